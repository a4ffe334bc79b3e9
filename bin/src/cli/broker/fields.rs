//! Text of the broker's commands: lines of one field, times and ages.

use std::{
    fmt::Display,
    time::{Duration, SystemTime},
};

use vmmfd::internals::clean;

/// The latest time that RFC 3339 can write, in milliseconds since 1970.
const LAST: u64 = 253_402_300_799_999;

/// A line with a name and a value.
pub(super) fn field(name: &str, value: impl Into<String>) -> String {
    let mut line = format!("{name:<9}  {}", value.into());
    clean(&mut line);
    line + "\n"
}

/// A process and its user.
pub(super) fn process(pid: impl Display, command: Option<&str>, uid: u32) -> String {
    let command = command.map_or_else(String::new, |command| format!(" ({command})"));
    format!("pid {pid}{command}, uid {uid}")
}

/// A cell of a table.
pub(super) fn or_dash(text: &Option<String>) -> String {
    text.clone().unwrap_or_else(|| "-".to_owned())
}

/// A time in milliseconds since 1970, as UTC (RFC 3339).
pub(super) fn time(ms: u64) -> String {
    humantime::format_rfc3339_millis(SystemTime::UNIX_EPOCH + Duration::from_millis(ms.min(LAST))).to_string()
}

/// The age of a time in milliseconds since 1970, in its largest unit: `5s`, `3m`, `2h`, `4d`.
pub(super) fn age(ms: u64) -> String {
    let since = SystemTime::UNIX_EPOCH + Duration::from_millis(ms.min(LAST));
    in_short(SystemTime::now().duration_since(since).unwrap_or_default())
}

fn in_short(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..=99 => format!("{seconds}s"),
        seconds @ 100..=5_999 => format!("{}m", seconds / 60),
        seconds @ 6_000..=172_799 => format!("{}h", seconds / 3600),
        seconds => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_have_one_unit() {
        for (seconds, text) in [(0, "0s"), (99, "99s"), (100, "1m"), (6_000, "1h"), (172_800, "2d")] {
            assert_eq!(in_short(Duration::from_secs(seconds)), text);
        }
        assert_eq!(time(1_000), "1970-01-01T00:00:01.000Z");
        assert_eq!(time(u64::MAX), "9999-12-31T23:59:59.999Z");
        assert_eq!(age(u64::MAX), "0s");
    }
}
