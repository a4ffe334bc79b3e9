//! Selection of a device by the user.

use std::{fmt, str::FromStr};

use crate::{
    driver::{Backend, DeviceUuid},
    error::{DeviceError, Error, ParseError, Result},
};

/// Selects a device by ordinal, by UUID, or by the first digits of a UUID.
///
/// Parses from `0`, from a UUID with or without `GPU-`, and from its first digits, such as `GPU-3710` or `3710040f-33`. Decimal digits
/// alone are an ordinal; after `GPU-` they are the first digits of a UUID.
///
/// ```
/// use vmmfd::{driver::{Backend, Choice, open}, memory::{Device, Selector}};
///
/// let driver = open(Choice::Only(Backend::Host))?.driver;
/// let selector: Selector = "0".parse()?;
/// assert_eq!(Device::find(&driver, selector)?.ordinal(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Selector {
    /// The ordinal among the devices visible to this process.
    Ordinal(u32),
    /// The UUID.
    Uuid(DeviceUuid),
    /// The first digits of a UUID. They must match one device only.
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
        let bare = DeviceUuid::strip_prefix(text);
        let mut digits = 0u128;
        let mut count = 0;
        for (at, character) in bare.char_indices() {
            match character.to_digit(16) {
                Some(digit) if count < 31 => (digits, count) = (digits << 4 | u128::from(digit), count + 1),
                // Hyphens are allowed between the groups of a UUID.
                None if character == '-' && [8, 13, 18, 23].contains(&at) => {}
                _ => return None,
            }
        }
        (count > 0).then_some(Self { digits, count })
    }

    fn matches(self, uuid: DeviceUuid) -> bool {
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
    /// Returns the selected device. `identity` returns a device's ordinal, UUID and display name.
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
                Self::Prefix(prefix) => prefix.matches(uuid),
            }
        };
        let list = |devices: &[&T]| {
            let names = devices.iter().map(|device| {
                let (ordinal, _, name) = identity(device);
                format!("{ordinal} is {name}")
            });
            names.collect::<Vec<_>>().join(", ")
        };
        let found: Vec<&T> = devices.iter().filter(wanted).collect();
        match found[..] {
            [device] => Ok(device),
            [] => Err(Error::Device(DeviceError::NotFound {
                backend: backend.as_str(),
                wanted: self.to_string(),
                available: list(&devices.iter().collect::<Vec<_>>()),
            })),
            ref several => {
                Err(Error::Device(DeviceError::Ambiguous { wanted: self.to_string(), fitting: list(several) }))
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
        let expected =
            "an ordinal such as 0, or a UUID or its first digits as nvidia-smi -L prints it: GPU-xxxxxxxx-...";
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
    fn device_is_selected_by_first_digits() {
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
    fn invalid_selectors_are_refused() {
        for text in ["", "-", "GPU-", "gpu0", "GPU--5", "5-a", "5a38f01f--b8", "-1", "0x1", "4294967296x"] {
            assert!(text.parse::<Selector>().is_err(), "{text}");
        }
    }

    #[test]
    fn printed_selectors_parse_back() {
        for text in ["7", "GPU-5a38f01f-b8", "GPU-5a38f01f", "GPU-5", "GPU-5a38f01f-b8a5-e311-08c4-d2a73da4788"] {
            assert_eq!(text.parse::<Selector>().unwrap().to_string(), text);
        }
    }
}
