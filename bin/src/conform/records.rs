//! Invalid records, which every implementation must reject.

use std::os::fd::AsFd;

use serde::Deserialize;
use vmmfd::{
    error::{Error, ErrorCode, Result},
    internals::{is_error, protocols},
    wire::{HEADER_LENGTH, MAX_BODY, VERSION},
};

use super::{
    CaseResult,
    memory::not_memory,
    page,
    peer::{Peer, WireMessage},
};

/// A record that is invalid at any point of a conversation.
#[derive(Deserialize)]
pub(super) struct InvalidRecord {
    pub(super) name: String,
    rule: String,
    /// The number of attached descriptors.
    descriptors: usize,
    #[serde(with = "hex::serde", rename = "hex")]
    record: Vec<u8>,
}

impl InvalidRecord {
    /// The number of the rule that it violates.
    pub(super) fn rule(&self) -> &'static str {
        page::find(&self.rule).map_or("R2", |(number, _)| number)
    }

    /// Sends it and expects an error. The reply to an invalid `error` must be silence.
    pub(super) fn send<M: WireMessage>(&self, peer: &mut Peer) -> CaseResult {
        let null = not_memory()?;
        peer.send_record(&self.record, &vec![null.as_fd(); self.descriptors])?;
        if is_error(&self.record) {
            return peer.expect_close::<M>("H5", "after an error that can't be decoded");
        }
        // The version is in the header, if the record has one.
        let header = self.record.first_chunk::<HEADER_LENGTH>().filter(|header| header.starts_with(b"VMFD"));
        let code = match header.map(|header| u16::from_le_bytes([header[4], header[5]])) {
            Some(version) if version != VERSION => ErrorCode::Version,
            _ => ErrorCode::Protocol,
        };
        peer.expect_error::<M>(self.rule(), code, &self.name)
    }
}

/// The `busy` kind, which both protocols have.
const BUSY: u16 = 7;

/// Invalid records for handoffs and streams: the golden records, and a record too long for that file.
///
/// # Errors
/// [`Error::Caller`] if the file is invalid; a test rules this out.
pub(super) fn invalid() -> Result<Vec<InvalidRecord>> {
    let mut records = read(protocols::GOLDEN)?;
    let record = record_of(BUSY, &format!("{{}}{}", " ".repeat(MAX_BODY - 1)));
    records.push(InvalidRecord { name: "a body of 65537 bytes".to_owned(), rule: "R1".into(), descriptors: 0, record });
    Ok(records)
}

/// Invalid records for a broker: from its own file, and the handoff records of kinds that both protocols have.
pub(super) fn invalid_for_broker() -> Result<Vec<InvalidRecord>> {
    let mut records = read(protocols::BROKER_GOLDEN)?;
    records.extend(invalid()?.into_iter().filter(|invalid| {
        let kind = invalid.record.get(6..8);
        kind.is_none_or(|kind| kind == BUSY.to_le_bytes())
    }));
    Ok(records)
}

fn read(golden: &str) -> Result<Vec<InvalidRecord>> {
    #[derive(Deserialize)]
    struct Golden {
        refused: Vec<InvalidRecord>,
    }
    let golden: Golden = serde_json::from_str(golden).map_err(|error| Error::Caller(Box::new(error)))?;
    Ok(golden.refused)
}

/// A record with a JSON body that no message type can express.
pub(super) fn record(kind: u16, body: &serde_json::Value) -> Vec<u8> {
    record_of(kind, &body.to_string())
}

/// A record with any text as its body.
pub(super) fn record_of(kind: u16, body: &str) -> Vec<u8> {
    let mut record = b"VMFD\x01\x00".to_vec();
    record.extend(kind.to_le_bytes());
    record.extend((body.len() as u32).to_le_bytes());
    record.extend([0; 4]);
    record.extend(body.as_bytes());
    record
}
