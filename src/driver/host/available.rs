//! The memory that this process can still use: the machine's available memory, or less if a control group limits it.
//!
//! Using more triggers the kernel's out-of-memory killer instead of an error, so the limit must be checked in advance. Reads cgroup v2 and
//! v1, at every level from this process's group to the root, because the tightest limit applies.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::driver::MemoryInfo;

/// Headroom for other processes: `MemAvailable` is only an estimate.
const RESERVE: u64 = 128 << 20;

/// The memory that can be allocated now, and the total.
pub(super) fn memory() -> io::Result<MemoryInfo> {
    memory_under(Path::new("/"))
}

fn memory_under(root: &Path) -> io::Result<MemoryInfo> {
    let meminfo = fs::read_to_string(root.join("proc/meminfo"))
        .map_err(|error| io::Error::new(error.kind(), format!("/proc/meminfo can't be read: {error}")))?;
    let field = |name: &str| {
        let value = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let kib = value.and_then(|value| value.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        kib.map(|kib| kib * 1024).ok_or_else(|| io::Error::other(format!("/proc/meminfo has no {name}")))
    };
    let machine = MemoryInfo { free: field("MemAvailable")?, total: field("MemTotal")? };
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let tightest = groups.lines().flat_map(|line| limits(root, line)).fold(machine, |least, limit| MemoryInfo {
        free: least.free.min(limit.free),
        total: least.total.min(limit.total),
    });
    Ok(MemoryInfo { free: tightest.free.saturating_sub(RESERVE), ..tightest })
}

/// The limits in one line of `/proc/self/cgroup`, from its group to the root of its hierarchy.
fn limits(root: &Path, line: &str) -> Vec<MemoryInfo> {
    let mut parts = line.splitn(3, ':');
    let (Some(_), Some(controllers), Some(group)) = (parts.next(), parts.next(), parts.next()) else {
        return Vec::new();
    };
    let (mount, files) = if controllers.is_empty() {
        (root.join("sys/fs/cgroup"), ("memory.max", "memory.current", "inactive_file "))
    } else if controllers.split(',').any(|controller| controller == "memory") {
        let files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ");
        (root.join("sys/fs/cgroup/memory"), files)
    } else {
        return Vec::new();
    };
    // In a container the group's path may be the host's, and not be mounted here. Then only the levels that exist count; the mount
    // itself is this container's group.
    let group = group.trim_start_matches('/').split('/').filter(|part| *part != "..").collect::<PathBuf>();
    group.ancestors().filter_map(|level| limit(&mount.join(level), files)).collect()
}

fn limit(folder: &Path, (max, current, inactive): (&str, &str, &str)) -> Option<MemoryInfo> {
    let number = |name: &str| fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
    let max = number(max)?;
    // Unused pages of files count as used, but are reclaimed before anything is killed.
    let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let reclaimable = stat.lines().find_map(|line| line.strip_prefix(inactive)?.parse::<u64>().ok()).unwrap_or(0);
    let used = number(current)?.saturating_sub(reclaimable);
    Some(MemoryInfo { free: max.saturating_sub(used), total: max })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 4194304 kB\n";
    const GIB: u64 = 1 << 30;

    fn machine(files: &[(&str, &str)]) -> MemoryInfo {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in [("proc/meminfo", MEMINFO)].iter().chain(files) {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        memory_under(root.path()).unwrap()
    }

    #[test]
    fn machine_limits_without_control_groups() {
        assert_eq!(machine(&[]), MemoryInfo { free: 4 * GIB - RESERVE, total: 8 * GIB });
    }

    #[test]
    fn tightest_v2_level_limits_without_file_pages() {
        let seen = machine(&[
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/memory.max", "2147483648\n"),
            ("sys/fs/cgroup/a/memory.current", "1610612736\n"),
            ("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 536870912\n"),
        ]);
        assert_eq!(seen, MemoryInfo { free: GIB - RESERVE, total: 2 * GIB });
    }

    #[test]
    fn v1_limits_with_host_paths() {
        let seen = machine(&[
            ("proc/self/cgroup", "4:cpu,memory:/docker/deadbeef\n1:name=systemd:/x\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1073741000\n"),
        ]);
        assert_eq!(seen, MemoryInfo { free: 0, total: GIB });
    }

    #[test]
    fn reads_this_machine() {
        let seen = memory().unwrap();
        assert!(seen.total > 0 && seen.free < seen.total, "{seen:?}");
    }
}
