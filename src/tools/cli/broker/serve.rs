//! `serve`: the broker itself.

use std::{
    io::{self, Write},
    path::PathBuf,
    process::{self, ExitCode},
    time::Duration,
};

use clap::Args;
use nix::{
    errno::Errno,
    libc,
    sys::resource::{Resource, getrlimit, setrlimit},
};
use serde::Serialize;

use super::{
    SCHEMA, count,
    values::{Limit, parse_limit, quota},
};
use crate::{
    broker::{
        Server, ServerConfig,
        keeper::{self, KeeperProcess, Kept, Role},
        notify::notify,
    },
    channel::{Cancel, broker_socket_path},
    error::Error,
    sys,
    tools::{
        cli::{
            Exit, Output, Tool, ToolOutput,
            exit::exit_codes,
            options::{parse_timeout, parse_uid},
            output::{Progress, complain, json_line},
            run::{GRACE, fail, raise_file_limit, run_tool},
        },
        stamp,
        units::bytes,
    },
    wire::clean,
};

/// Keeps GPU memory under names for processes that come and go: the broker
///
/// It needs no GPU and loads no driver: it keeps the descriptors of memory that clients put, and hands them out. What it keeps lives
/// until it is deleted, or until the broker ends. It runs until SIGTERM or SIGINT, and then exits with 0.
///
/// Two processes do it: the server, and a keeper that holds the server's descriptors too. If one is killed, the other starts it again and
/// clients connect again; nothing is lost unless both die at once, which frees the memory. SIGHUP to the keeper upgrades: it goes on with
/// the program that is at its path then. With --keeper an init restarts both: this process is the server alone, and `vmmfd keeper`
/// another service.
///
/// Once it accepts connections it prints one line, `broker    listening  PATH ...`, on stdout, or with --json on stderr: wait for that
/// line.
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("a signal ended it"))]
pub(in super::super) struct ServeOptions {
    /// Unix socket to listen on [default: $XDG_RUNTIME_DIR/vmmfd/broker.sock, else /tmp/vmmfd-UID/broker.sock]
    #[arg(long, value_name = "PATH", env = "VMMFD_BROKER_SOCKET", help_heading = "Meeting")]
    socket: Option<PathBuf>,

    /// User whose processes may connect, besides one's own and root; may be given several times
    #[arg(long = "allow-uid", value_name = "UID", value_parser = parse_uid, help_heading = "Meeting")]
    allow_uids: Vec<u32>,

    /// Group whose users' processes may connect; may be given several times
    #[arg(long = "allow-gid", value_name = "GID", value_parser = parse_gid, help_heading = "Meeting")]
    allow_gids: Vec<u32>,

    /// What each user may have: bytes (as claimed, with units), objects, leases, connections [default: no limits]
    #[arg(long, value_name = "KEY=VALUE,...", value_delimiter = ',', value_parser = parse_limit, help_heading = "Meeting")]
    quota: Vec<Limit>,

    /// Let other users connect without a quota: each of them can then take all the room that the broker has
    #[arg(long, conflicts_with = "quota", help_heading = "Meeting")]
    no_quota: bool,

    /// Longest silence of a client in the middle of a request: 500ms, 30s, 2m
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = parse_timeout, help_heading = "Meeting")]
    timeout: Duration,

    /// Unix socket of a running `vmmfd keeper`, which holds what this server has when it is stopped or killed
    #[arg(long, value_name = "PATH", conflicts_with = "no_keeper", help_heading = "Meeting")]
    keeper: Option<PathBuf>,

    /// Run without a keeper: what the server holds is lost when it is killed
    #[arg(long, alias = "no-supervisor", help_heading = "Meeting")]
    no_keeper: bool,

    /// Hold /dev/nvidia0 and so on open, so that the driver keeps the devices' memory also where persistence is off
    #[arg(long, help_heading = "Meeting")]
    hold_devices: bool,

    /// Takes memory of the host for that of a GPU: for tests with the emulated driver
    #[arg(long, hide = true, help_heading = "Meeting")]
    emulated: bool,

    /// What SIGHUP requests of a server that its keeper starts again.
    #[arg(skip)]
    restart: Option<Cancel>,

    #[command(flatten)]
    output: Output,
}

/// How long a server may take at its end, which waits for 10 s for a keeper that has everything, and for closes.
const END: Duration = Duration::from_secs(13);

/// What the catalogue may need: some hundred bytes for each version, and as much again while it is written anew.
const CATALOGUE: u64 = 1 << 30;

/// Raises the limit on the length of files, which a memfd has too. Refuses one that the catalogue could reach: nothing could be put or
/// deleted then.
fn require_file_size() -> crate::Result<()> {
    let failed = |errno: Errno| Error::system("raise the limit on the length of files", errno);
    let (soft, hard) = getrlimit(Resource::RLIMIT_FSIZE).map_err(failed)?;
    if soft < hard {
        setrlimit(Resource::RLIMIT_FSIZE, hard, hard).map_err(failed)?;
    }
    if hard < CATALOGUE {
        let reason = format!(
            "this process may write files of {hard} bytes (RLIMIT_FSIZE), and the catalogue may need {CATALOGUE}: \
             use `ulimit -f unlimited`, or LimitFSIZE=infinity in the unit"
        );
        return Err(Error::system("serve", io::Error::other(reason)));
    }
    Ok(())
}

fn parse_gid(text: &str) -> Result<u32, String> {
    text.parse()
        .map_err(|_| format!("`{text}` is not a group's number: write it as `id -g` prints it, 0 to 4294967295"))
}

#[derive(Debug, Serialize)]
struct ServeReport {
    schema: u32,
    tool: String,
    socket: String,
    pid: u32,
    /// What went with it.
    objects: u64,
    versions: u64,
    leases: u64,
    size: u64,
}

impl ServeOptions {
    /// Runs what this process is to be: the keeper, or the server.
    pub(in super::super) fn start(self) -> ExitCode {
        // A reader that has stopped must not stop the broker.
        if let Err(error) = sys::never_block_on_stderr() {
            return fail::<Self>(&Error::system("start a thread", error), self.output.json);
        }
        let code = self.run_role();
        sys::flush_stderr();
        code
    }

    fn run_role(self) -> ExitCode {
        let role = Role::from_environment();
        if role != Role::First {
            // Executed through /proc, it would be named after a number. It does not fail for a name.
            let _ = nix::sys::prctl::set_name(c"vmmfd");
        }
        if role == Role::First
            && let Err(error) = require_file_size()
        {
            return fail::<Self>(&error, self.output.json);
        }
        match role {
            Role::Server => match Cancel::new() {
                Ok(restart) => run_tool(Self { restart: Some(restart), ..self }),
                Err(error) => fail::<Self>(&error, self.output.json),
            },
            Role::UnderSupervisor => fail::<Self>(&keeper::replace_supervisor(), self.output.json),
            Role::First if self.no_keeper || self.keeper.is_some() => run_tool(self),
            _ => {
                self.output.start_log();
                let done = match role {
                    Role::Check => keeper::check().map(|()| 0),
                    _ => self.check_limits(role != Role::First).and_then(|()| self.path(role)).and_then(|path| {
                        // What it keeps has a descriptor each.
                        raise_file_limit();
                        KeeperProcess::of_service(&path, role)?.run()
                    }),
                };
                match done {
                    Ok(code) => ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX)),
                    Err(error) => fail::<Self>(&error, self.output.json),
                }
            }
        }
    }

    /// Refuses to let other users connect without limits. A broker that goes on with objects does not refuse: its clients hold them.
    fn check_limits(&self, goes_on: bool) -> crate::Result<()> {
        let shared = !self.allow_uids.is_empty() || !self.allow_gids.is_empty();
        if !shared || self.no_quota || !self.quota.is_empty() {
            return Ok(());
        }
        let problem = "other users may connect, and nothing limits what they put: limit each user, as with --quota \
                       bytes=64GiB,objects=1000,leases=10000,connections=100, or allow it with --no-quota";
        match goes_on {
            true => tracing::warn!("{problem}"),
            false => return Err(Error::Misuse { problem: problem.to_owned() }),
        }
        Ok(())
    }

    /// Where the broker listens. Once it does, nothing depends on the folder being there: it may have been removed.
    fn path(&self, role: Role) -> crate::Result<PathBuf> {
        match &self.socket {
            Some(path) if role != Role::First => Ok(path.clone()),
            given => broker_socket_path(given.as_deref()),
        }
    }

    /// What the keeper holds of a server before this one.
    fn kept(&self, cancel: &Cancel) -> crate::Result<Option<Kept>> {
        match &self.keeper {
            _ if Role::from_environment() == Role::Server => Kept::of_parent(cancel).map(Some),
            Some(path) => Kept::at(path, cancel).map(Some),
            None => Ok(None),
        }
    }

    /// Prints that clients can connect. A closed pipe is not an error.
    fn announce(&self, server: &Server) -> io::Result<()> {
        let mut line = format!("broker    listening  {} as pid {}", server.path().display(), process::id());
        clean(&mut line);
        if self.output.json {
            complain(&line);
            return Ok(());
        }
        let mut stdout = io::stdout().lock();
        match writeln!(stdout, "{line}").and_then(|()| stdout.flush()) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
            _ => Ok(()),
        }
    }
}

impl Tool for ServeOptions {
    const NAME: &'static str = "serve";

    fn output(&self) -> &Output {
        &self.output
    }

    fn restart(&self) -> Option<&Cancel> {
        self.restart.as_ref()
    }

    fn grace(&self) -> Duration {
        // Under a keeper of its own it waits until that has everything.
        if self.keeper.is_some() { GRACE + END } else { GRACE }
    }

    fn run(&self, cancel: &Cancel, _progress: &Progress) -> anyhow::Result<ToolOutput> {
        let path = self.path(Role::from_environment())?;
        let config = ServerConfig {
            allow_uids: self.allow_uids.clone(),
            allow_gids: self.allow_gids.clone(),
            quota: quota(&self.quota),
            hold_devices: self.hold_devices,
            emulated: self.emulated,
            timeout: self.timeout,
        };
        // What it takes over has a descriptor each.
        raise_file_limit();
        let kept = self.kept(cancel)?;
        let goes_on = Role::from_environment() == Role::Server || kept.as_ref().is_some_and(Kept::has_objects);
        self.check_limits(goes_on)?;
        let server = match kept {
            Some(kept) => Server::resume(&path, config, kept, cancel, self.restart.clone())?,
            None => Server::bind(&path, config, cancel)?,
        };
        if Role::from_environment() == Role::First {
            notify("READY=1");
        }
        if server.is_restarted() {
            tracing::info!(path = %server.path().display(), "serves again");
        } else {
            self.announce(&server)?;
        }
        let ended = server.run()?;
        if cancel.check().is_ok() && self.restart.as_ref().is_some_and(|restart| restart.check().is_err()) {
            return Ok(ToolOutput { text: String::new(), exit: Exit::Signal(libc::SIGHUP) });
        }
        let report = ServeReport {
            schema: SCHEMA,
            tool: stamp::tool(),
            socket: path.display().to_string(),
            pid: process::id(),
            objects: ended.objects,
            versions: ended.versions,
            leases: ended.leases,
            size: ended.bytes,
        };
        let text = if self.output.json { json_line(&report) } else { render(&report) };
        Ok(ToolOutput { text, exit: Exit::Verified })
    }
}

fn render(report: &ServeReport) -> String {
    let (objects, versions) = (count(report.objects, "object"), count(report.versions, "version"));
    let (size, leases) = (bytes(report.size), count(report.leases, "lease"));
    format!("broker    ended      with {objects}, {versions}, {size} as claimed, {leases}\n")
}
