//! Tokens and identifiers.

/// Sixteen random bytes. See getrandom(2).
pub(crate) fn random() -> [u8; 16] {
    let mut bytes = [0; 16];
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    // Requests of up to 256 bytes are neither cut short nor interrupted once the pool is initialised.
    assert_eq!(filled, Ok(bytes.len()), "getrandom(2) failed");
    bytes
}
