//! The origin of a report.

use std::time::SystemTime;

/// The program that created a report, such as `vmmfd 0.1.0`.
pub fn tool() -> String {
    format!("vmmfd {}", env!("CARGO_PKG_VERSION"))
}

/// The current time, in UTC to the second (RFC 3339).
pub fn now() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}
