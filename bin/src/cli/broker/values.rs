//! Parsers of option values for the broker's commands. Each error is one sentence with the correct form.

use std::collections::BTreeMap;

use nix::unistd::{Group, User};
use serde_json::Value;
use vmmfd::{
    broker::{Attached, Lifetime, Quota},
    wire::Check,
};

use crate::cli::options::{parse_size, parse_timeout};

/// Parses a JSON object.
pub(super) fn parse_object(text: &str) -> Result<Check, String> {
    match serde_json::from_str(text) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(_) => Err(r#"it is JSON but not an object: write fields with values, as {"engine": "x"}"#.to_owned()),
        Err(error) => Err(format!(r#"it is not JSON ({error}): write fields with values, as {{"engine": "x"}}"#)),
    }
}

/// Parses a JSON object whose numbers keep their digits.
pub(super) fn parse_texts(text: &str) -> Result<BTreeMap<String, Attached>, String> {
    parse_object(text)?;
    serde_json::from_str(text).map_err(|error| error.to_string())
}

/// Parses permissions in octal, as in chmod(1).
pub(super) fn parse_mode(text: &str) -> Result<u16, String> {
    let octal = !text.is_empty() && text.len() <= 4 && text.bytes().all(|digit| matches!(digit, b'0'..=b'7'));
    match octal.then(|| u16::from_str_radix(text, 8).ok()).flatten() {
        Some(mode) if mode & !0o666 == 0 => Ok(mode),
        Some(_) => Err(format!("`{text}` has more than read and write: write at most 666")),
        None => Err(format!("`{text}` is not a mode: write it in octal digits, as 600 or 644")),
    }
}

/// Parses the lifetime of a name after its last lease.
pub(super) fn parse_ttl(text: &str) -> Result<Lifetime, String> {
    if text == "never" {
        return Ok(Lifetime::Deleted);
    }
    let time = parse_timeout(text).map_err(|problem| format!("{problem}, or never"))?;
    match u64::try_from(time.as_millis()) {
        Ok(0) => Err(format!("`{text}` is less than a millisecond: write at least 1ms, or never")),
        Ok(ms) => Ok(Lifetime::Idle { ms }),
        Err(_) => Err(format!("`{text}` is too long: write never")),
    }
}

/// Parses a user's name or number.
pub(super) fn parse_user(text: &str) -> Result<u32, String> {
    let named = User::from_name(text).ok().flatten().map(|user| user.uid.as_raw());
    name_or_number(text, named, "user", "id -u")
}

/// Parses a group's name or number.
pub(super) fn parse_group(text: &str) -> Result<u32, String> {
    let named = Group::from_name(text).ok().flatten().map(|group| group.gid.as_raw());
    name_or_number(text, named, "group", "id -g")
}

fn name_or_number(text: &str, named: Option<u32>, what: &str, command: &str) -> Result<u32, String> {
    text.parse().ok().or(named).ok_or_else(|| {
        format!(
            "`{text}` is not a {what} of this machine: write a name, or a number as `{command}` prints it, 0 to 4294967295"
        )
    })
}

/// One limit of a user: its field, and the value.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limit(fn(&mut Quota) -> &mut Option<u64>, u64);

/// Parses `KEY=VALUE`.
pub(super) fn parse_limit(text: &str) -> Result<Limit, String> {
    let Some((key, value)) = text.split_once('=') else {
        return Err(format!("`{text}` has no value: write it as bytes=8GiB or objects=100"));
    };
    let number = || value.parse().map_err(|_| format!("`{value}` is not a number of {key}: write a whole number"));
    Ok(match key {
        "bytes" => Limit(|quota| &mut quota.bytes, parse_size(value)?),
        "device-bytes" => Limit(|quota| &mut quota.device_bytes, parse_size(value)?),
        "objects" => Limit(|quota| &mut quota.objects, number()?),
        "leases" => Limit(|quota| &mut quota.leases, number()?),
        "connections" => Limit(|quota| &mut quota.connections, number()?),
        _ => return Err(format!("`{key}` is not a limit: write bytes, device-bytes, objects, leases or connections")),
    })
}

/// Combines limits; a later limit of the same kind wins.
pub(super) fn quota(limits: &[Limit]) -> Quota {
    let mut quota = Quota::default();
    limits.iter().for_each(|Limit(field, most)| *field(&mut quota) = Some(*most));
    quota
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_values_have_one_sentence() {
        assert_eq!(parse_mode("644"), Ok(0o644));
        assert_eq!(parse_mode("0600"), Ok(0o600));
        for text in ["", "8", "-1", "755", "1666", "rw", "00644", "+644"] {
            assert!(parse_mode(text).unwrap_err().contains("write "), "{text}");
        }
        assert_eq!(parse_ttl("never"), Ok(Lifetime::Deleted));
        assert_eq!(parse_ttl("2m"), Ok(Lifetime::Idle { ms: 120_000 }));
        for text in ["", "0s", "30", "1us", "soon"] {
            assert!(parse_ttl(text).unwrap_err().contains("never"), "{text}");
        }
        assert_eq!(parse_object(r#"{"a": [1]}"#).unwrap()["a"][0], 1);
        for text in ["", "[1]", "3", "{", "{'a': 1}"] {
            assert!(parse_object(text).unwrap_err().contains("write "), "{text}");
        }
        assert_eq!((parse_user("root"), parse_user("7"), parse_group("7")), (Ok(0), Ok(7), Ok(7)));
        for text in ["", "-1", "4294967296", "no such user"] {
            assert!(parse_user(text).unwrap_err().contains("write "), "{text}");
            assert!(parse_group(text).unwrap_err().contains("write "), "{text}");
        }
        for text in ["", "bytes", "bytes=", "bytes=1GB", "objects=1GiB", "users=1", "leases=-1"] {
            assert!(parse_limit(text).unwrap_err().contains("write "), "{text}");
        }
        let limits = ["objects=1", "bytes=1.5GiB", "objects=3", "leases=0", "device-bytes=80GiB", "connections=7"];
        let Quota { bytes, device_bytes, objects, leases, connections, .. } =
            quota(&limits.map(|limit| parse_limit(limit).unwrap()));
        assert_eq!((bytes, device_bytes), (Some(3 << 29), Some(80 << 30)));
        assert_eq!((objects, leases, connections), (Some(3), Some(0), Some(7)));
    }
}
