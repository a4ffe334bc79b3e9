//! The BLAKE3 digest of memory whose blocks are hashed by several threads in any order.

use std::{
    num::NonZero,
    panic,
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

use blake3::{
    Hasher,
    hazmat::{ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root},
};

use crate::{
    error::{Error, Result},
    memory::Region,
};

/// How many bytes a thread copies and hashes at a time: a power of two, as BLAKE3 requires.
const BLOCK: u64 = 1 << 20;

/// The copies share one path to the device: on an H200 with 16 processors, a load took a sixth more time with 16 threads than with 8.
const MAX_THREADS: usize = 8;

/// The default number of threads of a load or a digest.
pub(super) fn default_threads() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get).min(MAX_THREADS)
}

/// Returns the BLAKE3 digest of adjacent memories, in the protocol's format, as [`LoadOptions::digest`](super::LoadOptions::digest) does.
///
/// Reads all bytes, with up to 8 threads, and blocks until then. All work on the memory must be complete.
///
/// # Errors
/// [`Error::Driver`](crate::Error::Driver). Driver calls: those of [`Region::copy_out`].
pub fn digest_of_memory<'a>(memories: impl IntoIterator<Item = &'a dyn Region>) -> Result<String> {
    let mut all = Adjacent { memories: Vec::new(), size: 0 };
    for memory in memories {
        all.memories.push((all.size, memory));
        all.size += memory.size();
    }
    let next = AtomicU64::new(0);
    let blocks = thread::scope(|scope| {
        let hash = || all.hash(&next);
        let spawn = |_| thread::Builder::new().name("vmmfd digest".to_owned()).spawn_scoped(scope, hash).ok();
        // Fewer threads suffice.
        let others: Vec<_> = (1..all.size.div_ceil(BLOCK).min(default_threads() as u64)).map_while(spawn).collect();
        let mut blocks = hash()?;
        for other in others {
            blocks.extend(other.join().unwrap_or_else(|panic| panic::resume_unwind(panic))?);
        }
        Ok::<_, Error>(blocks)
    })?;
    Ok(combine(blocks))
}

/// Memories and their starts.
struct Adjacent<'a> {
    memories: Vec<(u64, &'a dyn Region)>,
    size: u64,
}

impl Adjacent<'_> {
    /// Hashes blocks until none is left. Returns them with their indices.
    fn hash(&self, next: &AtomicU64) -> Result<Vec<(u64, Hash)>> {
        let mut blocks = Vec::new();
        let mut buffer = vec![0; BLOCK.min(self.size) as usize];
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let start = index * BLOCK;
            if start >= self.size {
                return Ok(blocks);
            }
            let bytes = &mut buffer[..BLOCK.min(self.size - start) as usize];
            self.copy_out(start, bytes)?;
            blocks.push((index, Hash::of(start, bytes, self.size)));
        }
    }

    fn copy_out(&self, start: u64, mut bytes: &mut [u8]) -> Result<()> {
        let mut offset = start;
        let first = self.memories.partition_point(|(begin, memory)| begin + memory.size() <= start);
        for (begin, memory) in &self.memories[first..] {
            let size = (memory.size() - (offset - begin)).min(bytes.len() as u64);
            let (part, rest) = bytes.split_at_mut(size as usize);
            memory.copy_out(offset - begin, part)?;
            (offset, bytes) = (offset + size, rest);
            if bytes.is_empty() {
                break;
            }
        }
        Ok(())
    }
}

/// The hash of a block.
#[derive(Debug)]
pub(super) enum Hash {
    Block(ChainingValue),
    /// The digest of a single block.
    All(String),
}

impl Hash {
    /// Hashes a block of memory of `size` bytes. Blocks start at multiples of the block size, a power of two, and only the last may be
    /// shorter.
    pub(super) fn of(start: u64, bytes: &[u8], size: u64) -> Self {
        match bytes.len() as u64 == size {
            true => Self::All(of_all(bytes)),
            false => Self::Block(of_block(start, bytes)),
        }
    }
}

/// Combines the hashes of blocks, which are in any order, to the digest of the whole.
pub(super) fn combine(mut blocks: Vec<(u64, Hash)>) -> String {
    blocks.sort_unstable_by_key(|(index, _)| *index);
    match blocks.pop() {
        None => of_all(&[]),
        Some((_, Hash::All(digest))) => digest,
        last => {
            let hashes = blocks.into_iter().chain(last).filter_map(|(_, hash)| match hash {
                Hash::Block(hash) => Some(hash),
                Hash::All(_) => None,
            });
            of_blocks(&hashes.collect::<Vec<ChainingValue>>())
        }
    }
}

fn of_block(offset: u64, bytes: &[u8]) -> ChainingValue {
    let mut hasher = Hasher::new();
    hasher.set_input_offset(offset);
    hasher.update(bytes);
    hasher.finalize_non_root()
}

/// The digest of at least two hashed blocks, in the protocol's format.
fn of_blocks(blocks: &[ChainingValue]) -> String {
    let (left, right) = split(blocks);
    text(merge_subtrees_root(&merge(left), &merge(right), Mode::Hash))
}

/// The digest of a single block.
fn of_all(bytes: &[u8]) -> String {
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
    use crate::{
        driver::{Backend, Choice, open},
        memory::{Device, Selector, Shared, Spec},
    };

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

    #[test]
    fn memories_have_the_digest_of_their_bytes() {
        let device = Device::find(&open(Choice::Only(Backend::Host)).unwrap().driver, Selector::default()).unwrap();
        for sizes in [&[4096][..], &[3 << 20], &[4096, 1 << 20, 5 << 20, 8192], &[]] {
            let memories: Vec<Shared> =
                sizes.iter().map(|size| Shared::create(&device, Spec::vmm(*size)).unwrap()).collect();
            let mut all = Vec::new();
            for (number, memory) in memories.iter().enumerate() {
                let bytes: Vec<u8> = (0..memory.size()).map(|at| (at % 251) as u8 ^ number as u8).collect();
                memory.copy_in(0, &bytes).unwrap();
                all.extend(bytes);
            }
            let digest = digest_of_memory(memories.iter().map(|memory| memory as &dyn Region)).unwrap();
            assert_eq!(digest, of_all(&all), "{sizes:?}");
        }
    }
}
