//! Ranks: processes of one program, whose libraries for communication may have mapped each other's memory. The driver can't restore these.
//!
//! No program can see such a mapping from outside. vLLM's ranks publish theirs with this project's load format or sleep backend. Of other
//! programs only NCCL's sockets are known: each communicator has an abstract socket with the rank in its name.

use std::fs;

use vmmfd::{
    error::Result,
    internals::{clean, ranks_of},
};

use super::{Process, failed, read};
use crate::error::ToolError;

/// Refuses processes that may have mapped memory of other ranks. With `apart`, the caller knows that the ranks which publish nothing haven't.
pub(super) fn check(processes: &[&Process], apart: bool) -> Result<()> {
    for process @ Process { pid, command, .. } in processes {
        let published = ranks_of(*pid)
            .map_err(|error| failed(*pid, command, &format!("can't be inspected: /proc/{pid}: {error}")))?;
        match published {
            Some(text) if text.is_empty() => {}
            Some(text) => {
                let (memory, remedy) = text.split_once('\n').unwrap_or((&text, ""));
                return Err(tied(process, format!("has mapped {memory}"), remedy.to_owned()));
            }
            None if !apart && has_further_rank(*pid) => {
                return Err(tied(process, UNKNOWN.to_owned(), UNKNOWN_REMEDY.to_owned()));
            }
            None => {}
        }
    }
    Ok(())
}

const UNKNOWN: &str = "may have mapped memory of other ranks, as it has a communicator of NCCL";

const UNKNOWN_REMEDY: &str = "start the program with NCCL_P2P_DISABLE=1 and NCCL_CUMEM_ENABLE=0, and without other libraries that share memory \
     between ranks (in vLLM: --disable-custom-all-reduce and VLLM_ALLREDUCE_USE_SYMM_MEM=0). Then --ranks-apart suspends it";

fn tied(Process { pid, command, .. }: &Process, mut reason: String, mut remedy: String) -> vmmfd::Error {
    clean(&mut reason);
    clean(&mut remedy);
    ToolError::Tied { pid: *pid, command: command.clone(), reason, remedy }.into()
}

/// Whether a process has a communicator of NCCL in which it isn't the first rank.
fn has_further_rank(pid: u32) -> bool {
    // Of its network namespace: the names are "@tmp/nccl-socket-RANK-HASH". See unix(7), proc_pid_net(5).
    let sockets = read(&format!("/proc/{pid}/net/unix"));
    let further: Vec<&str> = sockets.lines().filter_map(further_rank).collect();
    let own = |inode: &&str| {
        let link = format!("socket:[{inode}]");
        let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        files.map(|file| file.path()).any(|path| fs::read_link(path).is_ok_and(|target| target.as_os_str() == &*link))
    };
    further.iter().any(own)
}

/// The inode of the socket in a line, if it is NCCL's and of another rank than the first.
fn further_rank(line: &str) -> Option<&str> {
    let mut words = line.split_ascii_whitespace().skip(6);
    let (inode, name) = (words.next()?, words.next()?);
    let (rank, _) = name.split_once("nccl-socket-")?.1.split_once('-')?;
    (rank.parse::<u32>().ok()? > 0).then_some(inode)
}
