//! The BLAKE3 digest of memory whose blocks are hashed by several threads in any order.

use blake3::{
    Hasher,
    hazmat::{ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root},
};

use crate::{error::Result, memory::Region};

/// Returns the BLAKE3 digest of adjacent memories, in the protocol's format, as [`LoadOptions::digest`](super::LoadOptions::digest) does.
///
/// Reads all bytes, and blocks until then. All work on the memory must be complete.
///
/// # Errors
/// [`Error::Driver`](crate::Error::Driver). Driver calls: those of [`Region::copy_out`].
pub fn digest_of_memory<'a>(memories: impl IntoIterator<Item = &'a dyn Region>) -> Result<String> {
    let mut hasher = Hasher::new();
    let mut buffer = vec![0; 4 << 20];
    for memory in memories {
        let mut offset = 0;
        while offset < memory.size() {
            let bytes = usize::try_from(memory.size() - offset).map_or(buffer.len(), |rest| rest.min(buffer.len()));
            memory.copy_out(offset, &mut buffer[..bytes])?;
            hasher.update(&buffer[..bytes]);
            offset += bytes as u64;
        }
    }
    Ok(text(hasher.finalize()))
}

/// Hashes one of several blocks. Blocks start at multiples of the block size, a power of two, and only the last may be shorter.
pub(super) fn of_block(offset: u64, bytes: &[u8]) -> ChainingValue {
    let mut hasher = Hasher::new();
    hasher.set_input_offset(offset);
    hasher.update(bytes);
    hasher.finalize_non_root()
}

/// The digest of at least two hashed blocks, in the protocol's format.
pub(super) fn of_blocks(blocks: &[ChainingValue]) -> String {
    let (left, right) = split(blocks);
    text(merge_subtrees_root(&merge(left), &merge(right), Mode::Hash))
}

/// The digest of a single block.
pub(super) fn of_all(bytes: &[u8]) -> String {
    text(blake3::hash(bytes))
}

fn text(hash: blake3::Hash) -> String {
    format!("blake3:{}", hash.to_hex())
}

/// The left subtree gets as many blocks as possible: a power of two that leaves at least one block for the right.
fn split(blocks: &[ChainingValue]) -> (&[ChainingValue], &[ChainingValue]) {
    blocks.split_at(blocks.len().next_power_of_two() / 2)
}

fn merge(blocks: &[ChainingValue]) -> ChainingValue {
    match blocks {
        [one] => *one,
        _ => {
            let (left, right) = split(blocks);
            merge_subtrees_non_root(&merge(left), &merge(right), Mode::Hash)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_the_digest_of_the_whole() {
        const BLOCK: usize = 4096;
        let bytes: Vec<u8> = (0..BLOCK * 9).map(|at| (at % 251) as u8).collect();
        for size in (1..=9).flat_map(|blocks| [BLOCK * blocks, BLOCK * blocks - 1, BLOCK * (blocks - 1) + 1]) {
            let bytes = &bytes[..size];
            let blocks: Vec<ChainingValue> =
                (0u64..).zip(bytes.chunks(BLOCK)).map(|(index, block)| of_block(index * BLOCK as u64, block)).collect();
            let digest = if blocks.len() == 1 { of_all(bytes) } else { of_blocks(&blocks) };
            assert_eq!(digest, format!("blake3:{}", blake3::hash(bytes).to_hex()), "{size} bytes");
        }
    }
}
