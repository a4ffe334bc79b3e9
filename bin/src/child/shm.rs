//! Files that the driver leaves in shared memory.

use std::{fs, path::Path};

/// Removes the files of a killed process from `/dev/shm`. The driver creates a file per process, with the pid in hexadecimal in its name
/// (`cuda.shm.0.29f.1`), and removes it on exit.
pub(super) fn sweep(pid: u32) {
    sweep_folder(Path::new("/dev/shm"), pid);
}

fn sweep_folder(folder: &Path, pid: u32) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    let number = format!("{pid:x}");
    for entry in entries.flatten() {
        let name = entry.file_name();
        let mut parts = name.to_str().unwrap_or_default().split('.');
        let driver = [parts.next(), parts.next()] == [Some("cuda"), Some("shm")];
        if driver && parts.nth(1) == Some(&number) {
            // Fails for files of other users.
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removes_only_files_of_the_process() {
        let folder = tempfile::tempdir().unwrap();
        let own = ["cuda.shm.0.29f.1", "cuda.shm.3e8.29f.12"];
        let others = ["cuda.shm.0.29.1", "cuda.shm.29f.1.1", "cuda.shm.0.29f0.1", "other.shm.0.29f.1", "cuda.shm.0"];
        for name in own.iter().chain(&others) {
            fs::write(folder.path().join(name), "").unwrap();
        }
        sweep_folder(folder.path(), 0x29f);
        let there = |name: &&&str| folder.path().join(name).exists();
        assert_eq!((own.iter().filter(there).count(), others.iter().filter(there).count()), (0, others.len()));
        sweep_folder(&folder.path().join("none"), 1);
    }
}
