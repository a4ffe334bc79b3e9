//! Which bytes of which file go where in memory.

use std::ops::Range;

/// Bytes of a file, and where they go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    /// Where they begin in memory.
    pub memory: u64,
    pub length: u64,
    /// Which file.
    pub file: usize,
    /// Where they begin in it.
    pub offset: u64,
}

/// All spans, in the order of memory; none is empty, and none overlap.
#[derive(Debug, Default)]
pub(super) struct Layout {
    spans: Vec<Span>,
    end: u64,
}

impl Layout {
    /// Adds bytes behind what there is, aligned, and returns where they go; `None` if 64 bits can't say it. Those that follow each
    /// other in a file and in memory are one span.
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

    /// Where the last bytes end.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// The spans in a range of memory, cut to it.
    pub(super) fn within(&self, range: Range<u64>) -> impl Iterator<Item = Span> {
        let first = self.spans.partition_point(|span| span.memory + span.length <= range.start);
        self.spans[first..].iter().take_while(move |span| span.memory < range.end).map(move |span| {
            let start = span.memory.max(range.start);
            let end = (span.memory + span.length).min(range.end);
            Span { memory: start, length: end - start, file: span.file, offset: span.offset + (start - span.memory) }
        })
    }
}
