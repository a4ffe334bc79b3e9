//! Random tokens and identifiers.

/// Sixteen random bytes. See getrandom(2).
pub(crate) fn random() -> [u8; 16] {
    #[cfg(test)]
    if let Some(bytes) = crate::broker::server::simulation::random() {
        return bytes;
    }
    let mut bytes = [0; 16];
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    // After the pool is initialised, requests of up to 256 bytes are complete and not interrupted.
    assert_eq!(filled, Ok(bytes.len()), "getrandom(2) failed");
    bytes
}
