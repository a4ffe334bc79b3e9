//! Probes of two processes: one shares memory over the same sockets as a producer, and the other opens it.

use crate::doctor::{
    context::ProbeContext,
    outcome::ProbeResult,
    sharing::{MemoryKind, share, share_event},
};
use crate::verbs::HasVerbs;

pub(super) fn round_trip(context: &mut ProbeContext) -> ProbeResult {
    context.with_peer(|end, control, device| share(end, control, device, MemoryKind::ROUND_TRIP))
}

pub(super) fn host_numa(context: &mut ProbeContext) -> ProbeResult {
    context.with_peer(|end, control, device| share(end, control, device, MemoryKind::HOST))
}

pub(super) fn pool(context: &mut ProbeContext) -> ProbeResult {
    // Where it is not supported no other process is needed to see that.
    context.device.verbs().pools()?;
    context.with_peer(|end, control, device| share(end, control, device, MemoryKind::POOL))
}

pub(super) fn legacy(context: &mut ProbeContext) -> ProbeResult {
    context.device.verbs().legacy()?;
    context.with_peer(|end, control, device| share(end, control, device, MemoryKind::LEGACY))
}

pub(super) fn event(context: &mut ProbeContext) -> ProbeResult {
    context.device.verbs().diagnosis()?;
    context.with_peer(|_, control, device| share_event(control, device))
}
