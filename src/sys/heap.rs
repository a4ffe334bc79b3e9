//! Returns freed memory to the system.

/// The heap of a process that holds a varying number of objects.
#[derive(Debug, Default)]
pub(crate) struct Heap {
    /// The most objects since memory was last returned.
    most: usize,
}

impl Heap {
    /// The fewest objects whose memory is worth returning.
    const WORTH: usize = 2000;

    /// Notes the present number of objects. Once most of many are gone, returns the memory of freed blocks to the system, which takes some
    /// milliseconds. Other allocators than glibc's decide for themselves. See malloc_trim(3).
    pub(crate) fn note(&mut self, objects: usize) {
        self.most = self.most.max(objects);
        if self.most < Self::WORTH || objects > self.most / 4 {
            return;
        }
        self.most = objects;
        #[cfg(target_env = "gnu")]
        // SAFETY: malloc_trim may be called at any time, from any thread.
        unsafe {
            nix::libc::malloc_trim(0);
        }
    }
}
