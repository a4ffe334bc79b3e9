//! Converts Python's arguments to broker requests.

use std::{collections::HashMap, time::Duration};

use pyo3::{
    prelude::*,
    types::{PyBool, PyString},
};
use vmmfd::broker::{Condition, Get, Lifetime};

use crate::{
    error::{Failure, Outcome, shown, tolerant},
    json,
    leased_memory::Selection,
    time::seconds,
};

/// The default name of a part.
pub(crate) const PART: &str = "all";

/// One object of a `get_all`.
pub(crate) type GetRequest<'py> = (
    String,
    Option<u64>,
    Option<u64>,
    Option<Vec<String>>,
    Option<Vec<String>>,
    Option<Bound<'py, PyAny>>,
    Option<u32>,
    Option<Bound<'py, PyAny>>,
);

/// Builds a request.
pub(crate) fn request(
    name: &str,
    version: Option<u64>,
    newer_than: Option<u64>,
    selection: &Selection,
    expect: Option<&Bound<'_, PyAny>>,
    expect_owner: Option<u32>,
    digest: Option<&Bound<'_, PyAny>>,
) -> Outcome<Get> {
    let mut get = Get::new(name);
    get = version.into_iter().fold(get, Get::version);
    get = newer_than.into_iter().fold(get, Get::newer_than);
    if let Some(parts) = &selection.parts {
        get = get.parts(parts);
    }
    if let Some(arrays) = &selection.arrays {
        get = get.arrays(arrays);
    }
    if let Some(expect) = expect {
        get = get.expect(json::from_mapping(expect, "expect")?);
    }
    get = expect_owner.into_iter().fold(get, Get::expect_owner);
    if let Some(digest) = digest {
        if digest.is_instance_of::<PyString>() {
            let part = match selection.parts.as_deref() {
                Some([part]) => part,
                _ => PART,
            };
            return Ok(get.digest(part, digest.extract::<String>()?));
        }
        let digests: Option<HashMap<String, String>> = tolerant(digest.py(), digest.extract())?;
        let digests = digests.ok_or_else(|| {
            let given = json::type_of(digest);
            Failure::invalid(format!("digest has type {given}: give a str, or a mapping of parts to their digests"))
        })?;
        get = digests.into_iter().fold(get, |get, (part, digest)| get.digest(part, digest));
    }
    Ok(get)
}

pub(crate) fn with_wait(get: Get, wait: Option<&Bound<'_, PyAny>>) -> Outcome<Get> {
    Ok(wait_time(wait)?.into_iter().fold(get, Get::wait))
}

/// Converts a wait time. 0 does not wait, as `None`: a request without a wait fails with `absent`, not with `timeout`.
pub(crate) fn wait_time(wait: Option<&Bound<'_, PyAny>>) -> Outcome<Option<Duration>> {
    Ok(wait.map_or(Ok(None), |wait| seconds(wait, "wait"))?.filter(|wait| !wait.is_zero()))
}

/// Converts the condition of a put: `False`, `True`, or the version to replace.
pub(crate) fn condition(replace: Option<&Bound<'_, PyAny>>) -> Outcome<Condition> {
    let Some(replace) = replace.filter(|replace| !replace.is_none()) else { return Ok(Condition::New) };
    if let Ok(replace) = replace.cast::<PyBool>() {
        return Ok(if replace.is_true() { Condition::Any } else { Condition::New });
    }
    match tolerant(replace.py(), replace.extract())? {
        Some(version) => Ok(Condition::Version(version)),
        None => Err(Failure::invalid(format!(
            "replace={} is not False, True or the number of the version to replace",
            shown(replace)?
        ))),
    }
}

/// Converts a lifetime: `"deleted"`, `"maker"`, `"leased"`, or a time after the last lease.
pub(crate) fn lifetime(value: &Bound<'_, PyAny>) -> Outcome<Lifetime> {
    if value.is_instance_of::<PyString>() {
        return match value.extract::<String>()?.as_str() {
            "deleted" => Ok(Lifetime::Deleted),
            "maker" => Ok(Lifetime::Maker),
            "leased" => Ok(Lifetime::Leased),
            other => Err(Failure::invalid(format!(
                "lifetime={other:?} is not one of \"deleted\", \"maker\", \"leased\", and not a time in seconds"
            ))),
        };
    }
    let time = seconds(value, "lifetime")?.unwrap_or_default();
    Ok(Lifetime::Idle { ms: u64::try_from(time.as_millis()).unwrap_or(u64::MAX) })
}
