//! Records that no implementation may take.

use std::os::fd::AsFd;

use serde::Deserialize;
use vmmfd::{
    error::{Error, ErrorCode, Result},
    internals::{is_error, protocols},
    wire::{HEADER_LENGTH, MAX_BODY, VERSION},
};

use super::{fault::Fault, memory::not_memory, peer::Peer};

/// A record that breaks a rule wherever it comes.
pub(super) struct Unreadable {
    pub(super) name: String,
    pub(super) rule: &'static str,
    pub(super) code: ErrorCode,
    pub(super) record: Vec<u8>,
    /// How many descriptors come with it.
    pub(super) descriptors: usize,
}

impl Unreadable {
    /// Sends it. The other end must end the conversation: with its code, but without a word after an `error`.
    pub(super) fn send(&self, peer: &mut Peer) -> Result<(), Fault> {
        let null = not_memory().map_err(Fault::Failed)?;
        peer.send_record(&self.record, &vec![null.as_fd(); self.descriptors])?;
        match is_error(&self.record) {
            true => peer.leaves("H5", "after an error that can't be read"),
            false => peer.ends_with(self.rule, &[self.code], &self.name),
        }
    }
}

#[derive(Deserialize)]
struct Golden {
    refused: Vec<Refused>,
}

#[derive(Deserialize)]
struct Refused {
    name: String,
    rule: String,
    descriptors: usize,
    #[serde(with = "hex::serde")]
    hex: Vec<u8>,
}

/// The rules that records of that kind break, as cases name them.
const RULES: [&str; 10] = ["R1", "R2", "R3", "R4", "R6", "R7", "R8", "R9", "M3", "M4"];

/// The kind of `busy`, which both protocols have.
const BUSY: [u8; 2] = [7, 0];

/// All of them, for handoffs and streams: those of the golden records, and one that is too long to be written there.
///
/// # Errors
/// [`Error::Caller`] if that file is broken, which a test holds.
pub(super) fn unreadable() -> Result<Vec<Unreadable>> {
    read(protocols::GOLDEN)
}

/// All of them, for a broker: its own golden records, and those of the others that are wrong whatever their kind means.
///
/// # Errors
/// As [`unreadable`].
pub(super) fn unreadable_of_broker() -> Result<Vec<Unreadable>> {
    let shared = unreadable()?.into_iter().filter(|bad| bad.record.get(6..8).is_none_or(|kind| kind == BUSY));
    let mut all = read(protocols::BROKER_GOLDEN)?;
    // The one that is too long is among the others too.
    all.pop();
    all.extend(shared);
    Ok(all)
}

/// The version of the protocol in a record's header, if it has one.
fn protocol_of(record: &[u8]) -> Option<u16> {
    let header = record.first_chunk::<HEADER_LENGTH>()?;
    header.starts_with(b"VMFD").then(|| u16::from_le_bytes([header[4], header[5]]))
}

fn read(golden: &str) -> Result<Vec<Unreadable>> {
    let golden: Golden = serde_json::from_str(golden).map_err(|error| Error::Caller(Box::new(error)))?;
    let of = |refused: Refused| {
        let code = match protocol_of(&refused.hex) {
            Some(version) if version != VERSION => ErrorCode::Version,
            _ => ErrorCode::Protocol,
        };
        let rule = RULES.into_iter().find(|rule| *rule == refused.rule).unwrap_or("R2");
        let (name, record, descriptors) = (refused.name, refused.hex, refused.descriptors);
        Unreadable { name, rule, code, record, descriptors }
    };
    let mut all: Vec<Unreadable> = golden.refused.into_iter().map(of).collect();
    let long = record_of(7, &format!("{{}}{}", " ".repeat(MAX_BODY - 1)));
    let name = "a body of 65537 bytes".to_owned();
    all.push(Unreadable { name, rule: "R1", code: ErrorCode::Protocol, record: long, descriptors: 0 });
    Ok(all)
}

/// The rule, as a case names it.
pub(super) fn about(rule: &'static str) -> &'static [&'static str] {
    RULES.iter().position(|known| *known == rule).map_or(&[], |at| &RULES[at..=at])
}

/// A record of a body as it is.
pub(super) fn record(kind: u16, body: &serde_json::Value) -> Vec<u8> {
    record_of(kind, &body.to_string())
}

/// As [`record`], of a text that need not be JSON.
pub(super) fn record_of(kind: u16, body: &str) -> Vec<u8> {
    let mut record = b"VMFD\x01\x00".to_vec();
    record.extend(kind.to_le_bytes());
    record.extend((body.len() as u32).to_le_bytes());
    record.extend([0; 4]);
    record.extend(body.as_bytes());
    record
}
