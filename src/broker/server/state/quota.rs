//! Quotas per user and in total.

use super::{caller::is_superuser, refuse};
use crate::{
    error::{BrokerError, RefusalCode, units::bytes},
    wire::broker::Quota,
};

impl Quota {
    /// Default limits per user, except the server's own user and root.
    pub const fn user() -> Self {
        Self {
            bytes: Some(16 << 40),
            device_bytes: Some(2 << 40),
            objects: Some(20_000),
            leases: Some(100_000),
            connections: Some(10_000),
        }
    }

    /// Default limits for all users together. Memory is limited by the devices, connections by the descriptor limit.
    pub const fn total() -> Self {
        Self { bytes: None, device_bytes: None, objects: Some(100_000), leases: Some(400_000), connections: None }
    }

    /// No limits. Also applies to the server's own user and root.
    pub const fn unlimited() -> Self {
        let max = Some(u64::MAX);
        Self { bytes: max, device_bytes: max, objects: max, leases: max, connections: max }
    }

    /// Combines each limit with the limit of `other`.
    fn with(self, other: Self, each: fn(Option<u64>, Option<u64>) -> Option<u64>) -> Self {
        Self {
            bytes: each(self.bytes, other.bytes),
            device_bytes: each(self.device_bytes, other.device_bytes),
            objects: each(self.objects, other.objects),
            leases: each(self.leases, other.leases),
            connections: each(self.connections, other.connections),
        }
    }
}

/// A limited resource: its key in the options, its limit in a quota, and the text of an amount.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Counted {
    key: &'static str,
    of: fn(&Quota) -> Option<u64>,
    amount: fn(u64) -> String,
}

impl Counted {
    pub(crate) const BYTES: Self = Self { key: "bytes", of: |quota| quota.bytes, amount: bytes };
    pub(crate) const DEVICE_BYTES: Self = Self { key: "device-bytes", of: |quota| quota.device_bytes, amount: bytes };
    pub(crate) const OBJECTS: Self = Self { key: "objects", of: |quota| quota.objects, amount: number };
    pub(crate) const LEASES: Self = Self { key: "leases", of: |quota| quota.leases, amount: number };
    pub(crate) const CONNECTIONS: Self = Self { key: "connections", of: |quota| quota.connections, amount: number };
}

fn number(number: u64) -> String {
    number.to_string()
}

/// The limits in force. Configured limits apply to every user, default limits not to the server's own user and root.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Rules {
    user: Quota,
    total: Quota,
}

impl Rules {
    /// `user` limits each user, `total` all users together.
    pub(crate) fn new(user: Quota, total: Quota) -> Self {
        Self { user, total }
    }

    /// The limits per user (except the server's own user and root) and in total.
    pub(crate) fn limits(&self) -> (Quota, Quota) {
        let user = self.user.with(Quota::user(), Option::or);
        let total = self.total.with(Quota::total(), Option::or);
        // The largest number means no limit.
        let shown = |quota: Quota| quota.with(quota, |limit, _| limit.filter(|&max| max < u64::MAX));
        (shown(user), shown(total))
    }

    /// Refuses a request that exceeds a limit. `has` is the user's current amount, `all` the total of all users, `text` writes the amount.
    pub(crate) fn check(
        &self,
        uid: u32,
        counted: Counted,
        text: impl Fn(u64) -> String,
        (has, all): (u64, u64),
        more: u64,
    ) -> Result<(), BrokerError> {
        let amount = counted.amount;
        let is_superuser = is_superuser(uid);
        let limit = |given: Quota, default: Quota| {
            let default = if is_superuser { Quota::default() } else { default };
            (counted.of)(&given.with(default, Option::or))
        };
        let refuse = |limit: String| {
            let (has, more) = (text(has), amount(more));
            refuse(RefusalCode::Quota, format!("uid {uid} has {has} and asks for {more} more, but {limit}"))
        };
        if let Some(max) = limit(self.user, Quota::user()).filter(|max| has.saturating_add(more) > *max) {
            return refuse(format!("its quota is {}", amount(max)));
        }
        let Some(total) = limit(self.total, Quota::total()) else { return Ok(()) };
        let left = total.saturating_sub(all - has);
        let share = if is_superuser { left } else { left / 2 };
        if has.saturating_add(more) <= share {
            return Ok(());
        }
        let (half, key) = (if is_superuser { "" } else { "half of " }, counted.key);
        let share = amount(share);
        let left = amount(left);
        let total = amount(total);
        refuse(format!(
            "its share is {share}: {half}the {left} that other users leave of {total}; raise --total-quota {key}="
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::units::count;

    const USER_UID: u32 = 34_560;

    fn check(rules: &Rules, uid: u32, has: u64, all: u64, more: u64) -> Result<(), String> {
        rules
            .check(uid, Counted::OBJECTS, |has| count(has, "object"), (has, all), more)
            .map_err(|refusal| refusal.message)
    }

    #[test]
    fn root_has_no_default_limits() {
        let rules = Rules::default();
        let max = Quota::user().objects.unwrap();
        assert_eq!(check(&rules, USER_UID, max - 1, max - 1, 1), Ok(()));
        let refusal = check(&rules, USER_UID, max, max, 1).unwrap_err();
        assert!(refusal.ends_with(&format!("asks for 1 more, but its quota is {max}")), "{refusal}");
        assert_eq!(check(&rules, 0, max, max, 1), Ok(()));
        // A configured limit applies to root too.
        let given = Rules::new(Quota { objects: Some(1), ..Quota::default() }, Quota::default());
        assert!(check(&given, 0, 1, 1, 1).is_err());
        let unlimited = Rules::new(Quota::unlimited(), Quota::unlimited());
        assert_eq!(check(&unlimited, USER_UID, max, max, 1), Ok(()));
    }

    #[test]
    fn user_gets_half_of_rest() {
        let rules = Rules::new(Quota::default(), Quota { objects: Some(100), ..Quota::default() });
        assert_eq!(check(&rules, USER_UID, 49, 49, 1), Ok(()));
        let refusal = check(&rules, USER_UID, 50, 50, 1).unwrap_err();
        let want = "its share is 50: half of the 100 that other users leave of 100; raise --total-quota objects=";
        assert!(refusal.ends_with(want), "{refusal}");
        // The next user gets half of the rest, root all of it.
        assert_eq!(check(&rules, USER_UID + 1, 24, 74, 1), Ok(()));
        assert!(check(&rules, USER_UID + 1, 25, 75, 1).is_err());
        assert_eq!(check(&rules, 0, 24, 99, 1), Ok(()));
        assert!(check(&rules, 0, 25, 100, 1).is_err());
    }
}
