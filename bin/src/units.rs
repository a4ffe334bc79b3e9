//! Sizes, durations and devices for people. JSON has the exact ones.

use std::time::Duration;

use vmmfd::driver::DEVICE_NAME;
pub use vmmfd::internals::units::{about, bytes, count};

/// A device: its name, and its prefixed UUID in a form that options accept, with eight digits. `verbose`: the whole UUID.
pub fn device(name: &str, uuid: &str, verbose: bool) -> String {
    let name = if name == DEVICE_NAME { "host memory" } else { name };
    format!("{name} {}", if verbose { uuid } else { short(uuid).trim_start_matches("HOST-") })
}

/// A prefixed UUID with eight digits.
pub fn short(uuid: &str) -> &str {
    uuid.get(..uuid.len().saturating_sub(28)).filter(|short| !short.is_empty()).unwrap_or(uuid)
}

/// A digest with eight digits. `verbose`: the whole digest.
pub fn digest(digest: &str, verbose: bool) -> &str {
    let end = digest.find(':').map_or(0, |colon| colon + 1) + 8;
    digest.get(..end).filter(|_| !verbose).unwrap_or(digest)
}

/// A duration with at most three digits: `54 us`, `1.25 ms`, `113 ms`, `4.1 s`, `2 min 5 s`.
pub fn time(time: Duration) -> String {
    let us = time.as_secs_f64() * 1e6;
    match us {
        _ if us < 999.5 => format!("{us:.0} us"),
        _ if us < 9_995.0 => format!("{:.2} ms", us / 1e3),
        _ if us < 99_950.0 => format!("{:.1} ms", us / 1e3),
        _ if us < 999_500.0 => format!("{:.0} ms", us / 1e3),
        _ if us < 9_995_000.0 => format!("{:.2} s", us / 1e6),
        _ if us < 119_950_000.0 => format!("{:.1} s", us / 1e6),
        _ => {
            let seconds = time.as_secs();
            format!("{} min {} s", seconds / 60, seconds % 60)
        }
    }
}

/// A time limit without decimals: `500 ms`, `90 s`, `2 min`.
pub fn limit(time: Duration) -> String {
    match time.as_millis() {
        ms if ms.is_multiple_of(60_000) => format!("{} min", ms / 60_000),
        ms if ms.is_multiple_of(1000) => format!("{} s", ms / 1000),
        ms => format!("{ms} ms"),
    }
}

/// A duration in microseconds, as [`time`].
pub fn micros(us: u64) -> String {
    time(Duration::from_micros(us))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_and_digests_have_eight_digits() {
        let uuid = "HOST-679ee1d3-1095-d5a4-3f1b-b0cc79e99f21";
        assert_eq!(device(DEVICE_NAME, uuid, false), "host memory 679ee1d3");
        assert_eq!(device("NVIDIA H200", uuid, true), format!("NVIDIA H200 {uuid}"));
        // Another program's UUID may be short.
        assert_eq!((short("GPU-1"), short("")), ("GPU-1", ""));
        let long = format!("blake3:{}", "0123456789".repeat(6));
        assert_eq!((digest(&long, false), digest(&long, true)), ("blake3:01234567", long.as_str()));
        assert_eq!((digest("md5:0", false), digest("", false)), ("md5:0", ""));
    }

    #[test]
    fn limits_have_the_largest_unit() {
        for (ms, text) in [(500, "500 ms"), (1500, "1500 ms"), (90_000, "90 s"), (120_000, "2 min")] {
            assert_eq!(limit(Duration::from_millis(ms)), text);
        }
    }

    #[test]
    fn durations_have_three_digits() {
        for (us, text) in [
            (0, "0 us"),
            (54, "54 us"),
            (999, "999 us"),
            (1_000, "1.00 ms"),
            (1_254, "1.25 ms"),
            (9_996, "10.0 ms"),
            (113_342, "113 ms"),
            (999_600, "1.00 s"),
            (4_100_000, "4.10 s"),
            (59_960_000, "60.0 s"),
            (125_400_000, "2 min 5 s"),
        ] {
            assert_eq!(micros(us), text);
        }
    }
}
