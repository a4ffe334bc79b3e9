//! A process without memory of other processes: its leases are parked, so that the driver can restore it after a checkpoint.

use std::{
    process,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use pyo3::prelude::*;
use vmmfd::{Error, bindings::TieCounts};

use crate::{
    connections::{Connections, Purpose},
    error::{Failure, Outcome},
    leased_memory::Leased,
    memory::Tie,
    reaper,
};

/// The longest wait for memory that was dropped.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(5);

/// Parks all leases of this process. Parks none if one can't be parked, or if other memory ties the process to others.
///
/// # Errors
/// `ValueError` that names all obstacles; errors of the driver.
pub(crate) fn suspend(
    py: Python<'_>,
    connections: &Arc<Connections>,
    keep_lease: bool,
    exports_unused: bool,
    own_copies: bool,
) -> Outcome<()> {
    connections.check()?;
    let all = py.detach(|| {
        reaper::settle(SETTLE_TIMEOUT);
        let all = mapped();
        let mut obstacles: Vec<String> =
            all.iter().filter_map(|leased| leased_obstacle(connections, leased, exports_unused)).collect();
        obstacles.extend(imported().into_iter().chain(own(own_copies)?));
        refuse(obstacles)?;
        Ok::<_, Failure>(all)
    })?;
    let parked = py.detach(|| {
        for leased in &all {
            // Until the last one is parked, the broker keeps the versions, which may be mapped again.
            leased.park(true, exports_unused)?;
            leased.suspended.store(true, Ordering::Release);
        }
        reaper::settle(SETTLE_TIMEOUT);
        refuse(remaining(own_copies)?)?;
        match keep_lease {
            true => Ok(()),
            false => all.iter().try_for_each(|leased| leased.park(false, exports_unused)),
        }
    });
    parked.map_err(|refusal| match unpark(py, connections, &all, false) {
        Ok(()) => refusal,
        Err(error) => {
            let reasons = [refusal, error].map(PyErr::from).map(|error| error.value(py).to_string());
            Failure::invalid(format!(
                "{}; and leases are still parked, which resume() maps again: {}",
                reasons[0], reasons[1]
            ))
        }
    })
}

/// Unparks the leases that [`suspend`] parked and that are parked still: each at its version, or at the newest. Tries all, also after an error.
///
/// # Errors
/// The first error of a lease, which stays parked.
pub(crate) fn resume(py: Python<'_>, connections: &Arc<Connections>, newest: bool) -> Outcome<()> {
    unpark(py, connections, &Leased::all(), newest)
}

fn unpark(py: Python<'_>, connections: &Arc<Connections>, leases: &[Arc<Leased>], newest: bool) -> Outcome<()> {
    let mut done = Ok(());
    let is_ours = |leased: &Leased| leased.suspended.load(Ordering::Acquire) && is_of(leased, connections);
    for leased in leases.iter().filter(|leased| is_ours(leased)) {
        if leased.is_parked() {
            let get = leased.read(py, |object| {
                let get = leased.selection.get(object.name());
                if newest { get } else { get.version(object.version()) }
            });
            let unparked = connections.call(py, Purpose::Any, |client| leased.unpark(client.get(&get)?));
            done = done.and(unparked);
        }
    }
    done
}

/// The leases to park: private writes would be lost, and are in no driver's memory.
fn mapped() -> Vec<Arc<Leased>> {
    let mut all = Leased::all();
    all.retain(|leased| !leased.is_parked() && !leased.copy_on_write);
    all
}

fn is_of(leased: &Leased, connections: &Connections) -> bool {
    leased.place.path == connections.place.path
}

fn refuse(obstacles: Vec<String>) -> Outcome<()> {
    match obstacles.is_empty() {
        true => Ok(()),
        false => Err(Failure::invalid(format!("this process can't be suspended: {}", obstacles.join("; ")))),
    }
}

fn shown(leased: &Leased) -> String {
    leased.read_detached(|object| format!("version {} of {:?}", object.version(), object.name()))
}

/// The reason for which a mapped lease can't be parked.
fn leased_obstacle(connections: &Connections, leased: &Leased, exports_unused: bool) -> Option<String> {
    if !is_of(leased, connections) {
        let path = leased.place.path.display();
        return Some(format!("{} is leased from the broker at {path}: park or close it", shown(leased)));
    }
    match leased.exports() {
        0 => None,
        _ if exports_unused => None,
        count => Some(format!(
            "other libraries hold exports of {} ({count}): drop them, or give exports_unused=True if nothing uses them until resume",
            shown(leased)
        )),
    }
}

/// Names the memory of other processes that is mapped besides leases.
fn imported() -> Option<String> {
    listed(&Tie::IMPORTED).map(|memory| format!("{memory}: drop or close them"))
}

/// Names the memory that this process created for others.
fn own(copies: bool) -> Outcome<Option<String>> {
    let advice = "drop them, or give own_copies=True if no other process needs them";
    let memory = match counts()?.own {
        _ if copies => return Ok(None),
        0 => return Ok(None),
        count => listed(&Tie::OWN).unwrap_or_else(|| format!("allocations of vmmfd.torch.pool ({count})")),
    };
    Ok(Some(format!("{memory}: {advice}")))
}

/// Names the memory that ties this process to others although its leases are parked.
fn remaining(own_copies: bool) -> Outcome<Vec<String>> {
    let mut left: Vec<String> = own(own_copies)?.into_iter().collect();
    let count = counts()?.imported;
    if count > 0 {
        left.extend(mapped().iter().map(|leased| format!("{} was mapped meanwhile", shown(leased))));
        left.extend(imported());
        if left.is_empty() {
            left.push(format!("mappings that another library of this process made ({count})"));
        }
    }
    Ok(left)
}

fn counts() -> Outcome<TieCounts> {
    Ok(TieCounts::of(process::id()).map_err(|error| Error::system("read the counts of shared memory", error))?)
}

fn listed(ties: &[(Tie, &str)]) -> Option<String> {
    let counted = ties.iter().map(|(tie, memory)| (tie.count(), memory)).filter(|(count, _)| *count > 0);
    let listed: Vec<String> = counted.map(|(count, memory)| format!("{memory} ({count})")).collect();
    (!listed.is_empty()).then(|| listed.join(", "))
}
