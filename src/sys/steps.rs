//! Long system calls in steps, which a check of the program can stop.

use std::cell::Cell;

thread_local! {
    static CHECK: Cell<Option<fn() -> bool>> = const { Cell::new(None) };
}

/// Runs `work`. While this thread commits memory, calls `check` about every 30 ms; once it returns true, the allocation fails.
pub fn interruptible<T>(check: fn() -> bool, work: impl FnOnce() -> T) -> T {
    /// Also after a panic.
    struct Outer(Option<fn() -> bool>);

    impl Drop for Outer {
        fn drop(&mut self) {
            CHECK.set(self.0);
        }
    }

    let _outer = Outer(CHECK.replace(Some(check)));
    work()
}

/// Whether the program's check stops the work of this thread.
pub(crate) fn must_stop() -> bool {
    CHECK.get().is_some_and(|check| check())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::errno::Errno;

    #[test]
    fn check_stops_an_allocation() {
        let create = || crate::sys::memfd::create(c"vmmfd", 1 << 30);
        assert_eq!(interruptible(|| true, create).map(drop), Err(Errno::EINTR));
        assert!(!must_stop());
    }
}
