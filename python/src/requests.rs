//! Converts Python's arguments to broker requests.

use std::{collections::HashMap, time::Duration};

use pyo3::{
    prelude::*,
    types::{PyBool, PyString},
};
use vmmfd::broker::{Condition, Get, Lifetime};

use crate::{
    device,
    error::{Failure, Outcome, shown, tolerant},
    json,
    leased_memory::{Opening, Selection},
    text::Text,
    time::seconds,
};

/// The default name of a part.
pub(crate) const PART: &str = "all";

/// The options of a get: a dict that `vmmfd._arguments` has checked.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct GetOptions<'py> {
    version: Option<u64>,
    newer_than: Option<u64>,
    parts: Option<Vec<String>>,
    arrays: Option<Vec<String>>,
    expect: Option<Bound<'py, PyAny>>,
    expect_owner: Option<u32>,
    digest: Option<Bound<'py, PyAny>>,
    wait: Option<Bound<'py, PyAny>>,
    // Converted later: the derived code would replace the error.
    device: Option<Bound<'py, PyAny>>,
    copy_on_write: Option<bool>,
}

impl GetOptions<'_> {
    /// Takes the options for the mapping of a lease.
    pub(crate) fn opening(&mut self) -> Outcome<Opening> {
        Ok(Opening {
            device: self.device.as_ref().map(device::selector).transpose()?,
            selection: Selection { parts: self.parts.take(), arrays: self.arrays.take(), range: None },
            copy_on_write: self.copy_on_write == Some(true),
        })
    }

    pub(crate) fn wait(&self) -> Outcome<Option<Duration>> {
        wait_time(self.wait.as_ref())
    }

    /// Builds the request for a selection.
    pub(crate) fn request(&self, name: &str, selection: &Selection) -> Outcome<Get> {
        let mut get = selection.get(name);
        get = self.version.into_iter().fold(get, Get::version);
        get = self.newer_than.into_iter().fold(get, Get::newer_than);
        if let Some(expect) = &self.expect {
            get = get.expect(json::from_mapping(expect, "expect")?);
        }
        get = self.expect_owner.into_iter().fold(get, Get::expect_owner);
        get = self.wait()?.into_iter().fold(get, Get::wait);
        let Some(digest) = &self.digest else { return Ok(get) };
        if digest.is_instance_of::<PyString>() {
            let part = match selection.parts.as_deref() {
                Some([part]) => part,
                _ => PART,
            };
            return Ok(get.digest(part, digest.extract::<String>()?));
        }
        let digests: HashMap<String, String> = digest.extract()?;
        Ok(digests.into_iter().fold(get, |get, (part, digest)| get.digest(part, digest)))
    }
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
        return match &*value.extract::<Text>()? {
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
