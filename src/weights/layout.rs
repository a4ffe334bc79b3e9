//! Maps ranges of files to offsets in memory.

use std::ops::Range;

/// A range of a file, and its place in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    /// The offset in memory.
    pub memory: u64,
    pub length: u64,
    /// The index of the file.
    pub file: usize,
    /// The offset in the file.
    pub offset: u64,
}

/// All spans, ordered by memory offset. None is empty, and none overlap.
#[derive(Debug, Default)]
pub(super) struct Layout {
    spans: Vec<Span>,
    end: u64,
}

impl Layout {
    /// Appends a range at the next aligned offset, which is returned; `None` if it does not fit 64 bits. A range that continues the
    /// previous span, in the file and in memory, extends it.
    pub(super) fn push(&mut self, file: usize, offset: u64, length: u64, alignment: u64) -> Option<u64> {
        let memory = self.end.checked_next_multiple_of(alignment)?;
        self.end = memory.checked_add(length)?;
        match self.spans.last_mut() {
            Some(last)
                if last.file == file && last.offset + last.length == offset && last.memory + last.length == memory =>
            {
                last.length += length;
            }
            _ => self.spans.push(Span { memory, length, file, offset }),
        }
        Some(memory)
    }

    /// The end of the last span in memory.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// The spans inside a range of memory, clipped to it.
    pub(super) fn within(&self, range: Range<u64>) -> impl Iterator<Item = Span> {
        let first = self.spans.partition_point(|span| span.memory + span.length <= range.start);
        self.spans[first..].iter().take_while(move |span| span.memory < range.end).map(move |span| {
            let start = span.memory.max(range.start);
            let end = (span.memory + span.length).min(range.end);
            Span { memory: start, length: end - start, file: span.file, offset: span.offset + (start - span.memory) }
        })
    }
}
