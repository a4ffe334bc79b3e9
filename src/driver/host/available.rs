//! The memory that this process can still use: the machine's available memory, or less if a control group limits it.
//!
//! Using more triggers the kernel's out-of-memory killer instead of an error, so the limit must be checked in advance. Reads cgroup v2 and
//! v1, at every level from this process's group to the root, because the tightest limit applies.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::{
    driver::MemoryInfo,
    error::{Error, Result},
};

/// Headroom for other processes: `MemAvailable` is only an estimate.
const RESERVE: u64 = 128 << 20;

/// The memory that can be allocated now, and the total.
pub(super) fn memory() -> Result<MemoryInfo> {
    memory_under(Path::new("/"))
}

fn memory_under(root: &Path) -> Result<MemoryInfo> {
    let meminfo = fs::read_to_string(root.join("proc/meminfo"))
        .map_err(|error| Error::system("read /proc/meminfo, which has the free memory", error))?;
    let field = |name: &str| {
        let value = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let kib = value.and_then(|value| value.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        kib.map(|kib| kib * 1024).ok_or_else(|| {
            Error::system("find the free memory", io::Error::other(format!("/proc/meminfo has no {name}")))
        })
    };
    let machine = MemoryInfo { free: field("MemAvailable")?, total: field("MemTotal")? };
    let groups = read(&root.join("proc/self/cgroup"))?.unwrap_or_default();
    let mut tightest = machine;
    for folder in groups.lines().flat_map(|line| folders(root, line)) {
        if let Some(limit) = limit(&folder)? {
            tightest = MemoryInfo { free: tightest.free.min(limit.free), total: tightest.total.min(limit.total) };
        }
    }
    Ok(MemoryInfo { free: tightest.free.saturating_sub(RESERVE), ..tightest })
}

/// The folders of the groups in one line of `/proc/self/cgroup`, from its group to the root of its hierarchy.
fn folders(root: &Path, line: &str) -> Vec<PathBuf> {
    let mut parts = line.splitn(3, ':');
    let (Some(_), Some(controllers), Some(group)) = (parts.next(), parts.next(), parts.next()) else {
        return Vec::new();
    };
    let mount = if controllers.is_empty() {
        root.join("sys/fs/cgroup")
    } else if controllers.split(',').any(|controller| controller == "memory") {
        root.join("sys/fs/cgroup/memory")
    } else {
        return Vec::new();
    };
    // In a container the group's path may be the host's, and not be mounted here. Then only the levels that exist count; the mount
    // itself is this container's group.
    let group = group.trim_start_matches('/').split('/').filter(|part| *part != "..").collect::<PathBuf>();
    group.ancestors().map(|level| mount.join(level)).collect()
}

/// The limit of a group, if it has one.
fn limit(folder: &Path) -> Result<Option<MemoryInfo>> {
    let number =
        |name: &str| Ok::<_, Error>(read(&folder.join(name))?.and_then(|text| text.trim().parse::<u64>().ok()));
    let versions = [("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")];
    for (max, current) in versions {
        let (Some(max), Some(current)) = (number(max)?, number(current)?) else { continue };
        let used = current.saturating_sub(reclaimable(&read(&folder.join("memory.stat"))?.unwrap_or_default()));
        return Ok(Some(MemoryInfo { free: max.saturating_sub(used), total: max }));
    }
    Ok(None)
}

/// The memory in a `memory.stat` that counts as used, but that the kernel reclaims before it kills a process: pages of files, whether
/// read once or often, and the kernel's caches. Shared memory is in neither. Version 1 has the whole group's values under `total_`.
fn reclaimable(stat: &str) -> u64 {
    let names = ["inactive_file", "active_file", "slab_reclaimable"];
    let value =
        |name: &str| stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse::<u64>().ok());
    names.iter().filter_map(|name| value(&format!("total_{name}")).or_else(|| value(name))).sum()
}

/// The contents of a file, or `None` if this system does not have it. Any other failure must not look like a missing limit.
fn read(path: &Path) -> Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) => Ok(None),
        Err(error) => Err(Error::system(format!("read {}", path.display()), error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 4194304 kB\n";
    /// 512 MiB that can be reclaimed.
    const STAT: &str =
        "anon 1\nfile 1\nshmem 9\ninactive_file 134217728\nactive_file 268435456\nslab_reclaimable 134217728\n";
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
            ("sys/fs/cgroup/a/memory.stat", STAT),
        ]);
        assert_eq!(seen, MemoryInfo { free: GIB - RESERVE, total: 2 * GIB });
    }

    #[test]
    fn v1_limits_with_host_paths() {
        let seen = machine(&[
            ("proc/self/cgroup", "4:cpu,memory:/docker/deadbeef\n1:name=systemd:/x\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1073741824\n"),
            ("sys/fs/cgroup/memory/memory.stat", "active_file 1\ntotal_inactive_file 1\ntotal_active_file 536870911\n"),
        ]);
        assert_eq!(seen, MemoryInfo { free: GIB / 2 - RESERVE, total: GIB });
    }

    #[test]
    fn unreadable_limit_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("memory.max")).unwrap();
        assert!(limit(root.path()).is_err());
    }

    #[test]
    fn reads_this_machine() {
        let seen = memory().unwrap();
        assert!(seen.total > 0 && seen.free < seen.total, "{seen:?}");
    }
}
