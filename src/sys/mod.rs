//! System calls that no crate here wraps, each behind a safe function. The only place outside `driver/` with `unsafe`.
#![allow(unsafe_code)]
