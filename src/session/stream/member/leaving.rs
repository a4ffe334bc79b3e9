//! How a connection ends: by its peer, by its process, or by the publisher.

use std::time::{Duration, Instant};

use super::{Member, Stage};
use crate::{
    error::{Error, PeerError, ProtocolError, Result},
    session::{
        link::{code_for, violation},
        stream::{
            event::Event,
            hub::{Desk, Hub},
            ledger::Tally,
        },
    },
    wire::{Failure, MAX_HELD, Message},
};

/// How long a refused peer may take to read the reason and close.
pub(super) const GRACE: Duration = Duration::from_millis(100);

/// The most records that a former subscriber may send without giving back a buffer: returns that crossed its `leave`, and the `leave`.
const MAX_LATE: usize = MAX_HELD as usize + 2;

impl Member {
    pub(super) fn count_late(&mut self) -> Result<()> {
        self.late += 1;
        if self.late > MAX_LATE { Err(violation("a former subscriber sends too many records")) } else { Ok(()) }
    }

    /// Ends the subscription. The subscriber keeps buffers until it gives them back or its process exits.
    pub(super) fn retire(&mut self, orderly: bool, keeps: impl Fn(u64, bool) -> bool, desk: &mut Desk) {
        self.report_left(orderly, desk);
        self.stage = Stage::Former;
        if !desk.ledger.leave(self.id, keeps) {
            self.vanish(desk);
        }
    }

    /// The peer has closed the connection or can't be served any longer.
    pub(super) fn hang_up(&mut self, desk: &mut Desk, hub: &Hub) {
        // Until its process is gone, it may still read its buffers.
        let can_wait = self.process_token.is_some() && self.may_hold();
        self.retire(false, |_, _| can_wait, desk);
        self.close_socket(hub);
    }

    /// The peer's process has exited.
    pub(in super::super) fn process_gone(&mut self, desk: &mut Desk) {
        self.report_left(false, desk);
        desk.ledger.leave(self.id, |_, _| false);
        self.vanish(desk);
    }

    pub(super) fn report_left(&self, orderly: bool, desk: &mut Desk) {
        if self.is_subscribed() {
            let Tally { delivered, skipped } = desk.ledger.tally(self.id);
            desk.report(Event::Left { subscriber: self.info(), orderly, delivered, skipped });
        }
    }

    pub(super) fn vanish(&mut self, desk: &mut Desk) {
        self.stage = Stage::Gone;
        desk.has_gone = true;
    }

    /// Ends the subscription against its will. Its buffers remain out of use until it gives them back or its process exits.
    pub(in super::super) fn evict(&mut self, reason: &Error, desk: &mut Desk, hub: &Hub) {
        desk.report(Event::Evicted(self.info()));
        self.stop(reason, desk, hub);
    }

    /// Sends an error to the peer, and accepts nothing more than returned buffers.
    pub(in super::super) fn refuse(&mut self, error: &Error, desk: &mut Desk, hub: &Hub) {
        let peer = self.identity.peer;
        tracing::info!(pid = peer.pid, uid = peer.uid, error = error.in_full(), "refusing a subscriber");
        let is_unreadable = matches!(error, Error::Peer(PeerError::Protocol(ProtocolError::UnreadableError { .. })));
        if is_unreadable || matches!(self.stage, Stage::Former) {
            return self.hang_up(desk, hub);
        }
        self.report_left(false, desk);
        self.stop(error, desk, hub);
    }

    pub(super) fn stop(&mut self, error: &Error, desk: &mut Desk, hub: &Hub) {
        self.send_error(error);
        if let Some(socket) = &self.socket {
            let _ = socket.shut_down_writing();
        }
        let keeps = self.may_hold();
        let deadline = Instant::now() + GRACE;
        self.stage = if desk.ledger.leave(self.id, |_, _| keeps) { Stage::Former } else { Stage::Refused { deadline } };
        self.is_blocked = false;
        self.arm(desk, hub);
        hub.watcher.wake();
    }

    pub(in super::super) fn send_error(&self, error: &Error) {
        if let Some(code) = code_for(error) {
            self.send(&Message::Error(Failure { code, message: error.in_full() }));
        }
    }
}
