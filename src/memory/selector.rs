//! Which device, as a user names it.

use std::{fmt, str::FromStr};

use crate::{
    driver::{Backend, DeviceUuid},
    error::{DeviceError, Error, ParseError, Result},
};

/// Which device: by ordinal among those visible to this process, by UUID, or by the first digits of one.
///
/// Parses from `0`, from a UUID with or without `GPU-`, and from its beginning, as in `GPU-3710` or `3710040f-33`. A text of decimal
/// digits alone is an ordinal; with `GPU-` before it, it is the beginning of a UUID.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Selector {
    /// The number of a device in this process.
    Ordinal(u32),
    /// The identity of a device.
    Uuid(DeviceUuid),
    /// The beginning of an identity, which must belong to one device.
    Prefix(UuidPrefix),
}

/// The first digits of a device's UUID: 1 to 31 of the 32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UuidPrefix {
    /// The digits, in the lowest bits.
    digits: u128,
    count: u32,
}

impl UuidPrefix {
    fn parse(text: &str) -> Option<Self> {
        let bare = DeviceUuid::without_kind(text);
        let (mut digits, mut count) = (0u128, 0);
        for (at, character) in bare.char_indices() {
            match character.to_digit(16) {
                Some(digit) if count < 31 => (digits, count) = (digits << 4 | u128::from(digit), count + 1),
                // The groups of a UUID end here.
                None if character == '-' && [8, 13, 18, 23].contains(&at) => {}
                _ => return None,
            }
        }
        (count > 0).then_some(Self { digits, count })
    }

    fn begins(self, uuid: DeviceUuid) -> bool {
        uuid.as_u128() >> (128 - 4 * self.count) == self.digits
    }
}

impl fmt::Display for UuidPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU-")?;
        for at in 0..self.count {
            if [8, 12, 16, 20].contains(&at) {
                f.write_str("-")?;
            }
            write!(f, "{:x}", self.digits >> (4 * (self.count - 1 - at)) & 0xf)?;
        }
        Ok(())
    }
}

impl Selector {
    /// The device that is meant, of those that there are. `identity` returns a device's ordinal, UUID and name for people.
    pub(crate) fn choose<T>(
        self,
        backend: Backend,
        devices: &[T],
        identity: impl Fn(&T) -> (i32, DeviceUuid, String),
    ) -> Result<&T> {
        let wanted = |device: &&T| {
            let (ordinal, uuid, _) = identity(device);
            match self {
                Self::Ordinal(wanted) => i64::from(ordinal) == i64::from(wanted),
                Self::Uuid(wanted) => uuid == wanted,
                Self::Prefix(prefix) => prefix.begins(uuid),
            }
        };
        let listed = |devices: &[&T]| {
            let listed: Vec<String> = devices
                .iter()
                .map(|device| {
                    let (ordinal, _, shown) = identity(device);
                    format!("{ordinal} is {shown}")
                })
                .collect();
            listed.join(", ")
        };
        let found: Vec<&T> = devices.iter().filter(wanted).collect();
        match found[..] {
            [device] => Ok(device),
            [] => Err(Error::Device(DeviceError::NotFound {
                backend: backend.as_str(),
                wanted: self.to_string(),
                available: listed(&devices.iter().collect::<Vec<_>>()),
            })),
            ref several => {
                Err(Error::Device(DeviceError::Ambiguous { wanted: self.to_string(), fitting: listed(several) }))
            }
        }
    }
}

impl Default for Selector {
    fn default() -> Self {
        Self::Ordinal(0)
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ordinal(ordinal) => ordinal.fmt(f),
            Self::Uuid(uuid) => uuid.fmt(f),
            Self::Prefix(prefix) => prefix.fmt(f),
        }
    }
}

impl FromStr for Selector {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        if let Ok(ordinal) = text.parse() {
            return Ok(Self::Ordinal(ordinal));
        }
        if let Ok(uuid) = text.parse() {
            return Ok(Self::Uuid(uuid));
        }
        let expected = "an ordinal such as 0, or a UUID or its beginning as nvidia-smi -L prints it: GPU-xxxxxxxx-...";
        UuidPrefix::parse(text).map(Self::Prefix).ok_or_else(|| ParseError::new(text, "a device", expected))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(text: &str) -> Result<usize> {
        let devices = [
            "5a38f01f-b8a5-e311-08c4-d2a73da47883",
            "5a38f01f-b8a6-e311-08c4-d2a73da47883",
            "00000000-0000-5000-8000-000000000001",
        ];
        let devices: Vec<(usize, DeviceUuid)> =
            devices.iter().enumerate().map(|(at, uuid)| (at, uuid.parse().unwrap())).collect();
        let identity = |&(at, uuid): &(usize, DeviceUuid)| (at as i32, uuid, uuid.to_string());
        text.parse::<Selector>().unwrap().choose(Backend::Cuda, &devices, identity).map(|(at, _)| *at)
    }

    #[test]
    fn a_uuid_is_named_by_its_beginning() {
        for (text, at) in [
            ("0", 0),
            ("2", 2),
            ("GPU-5a38f01f-b8a5-e311-08c4-d2a73da47883", 0),
            ("gpu-5a38f01f-b8a5", 0),
            ("5A38F01F-b8a6-", 1),
            ("GPU-5a38f01fb8a6", 1),
            ("GPU-0", 2),
            ("00000000-0000-5", 2),
            ("5a38f01f-b8a5-e311-08c4-d2a73da4788", 0),
        ] {
            assert_eq!(chosen(text).unwrap(), at, "{text}");
        }
        let error = chosen("GPU-5a38f01f-b8a").unwrap_err();
        assert!(matches!(&error, Error::Device(DeviceError::Ambiguous { wanted, fitting })
            if wanted == "GPU-5a38f01f-b8a" && fitting.contains("1 is 5a38f01f-b8a6") && !fitting.contains("2 is")));
        for missing in ["3", "GPU-6", "5a38f01f-b8a5-e311-08c4-d2a73da47880"] {
            assert!(matches!(chosen(missing), Err(Error::Device(DeviceError::NotFound { .. }))), "{missing}");
        }
    }

    #[test]
    fn what_is_no_device_is_refused() {
        for text in ["", "-", "GPU-", "gpu0", "GPU--5", "5-a", "5a38f01f--b8", "-1", "0x1", "4294967296x"] {
            assert!(text.parse::<Selector>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_selector_reads_what_it_prints() {
        for text in ["7", "GPU-5a38f01f-b8", "GPU-5a38f01f", "GPU-5", "GPU-5a38f01f-b8a5-e311-08c4-d2a73da4788"] {
            assert_eq!(text.parse::<Selector>().unwrap().to_string(), text);
        }
    }
}
