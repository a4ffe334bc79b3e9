//! What the demonstration puts into memory and how it is checked: a pattern, or a file's bytes.

pub mod files;
pub mod pattern;
