//! `serve`: the broker itself.

use std::{
    io,
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
use schemars::JsonSchema;
use serde::Serialize;
use vmmfd::{
    broker::{KeeperPath, Quota, Server, ServerConfig},
    channel::{Cancel, broker_socket_path},
    error::Error,
    internals::{
        check_socket, default_broker_socket, emulated, is_restarted,
        keeper::{self, Role, ServiceProcess},
        notify, started_by_keeper, stderr,
    },
};

use super::{
    count,
    values::{Limit, parse_group, parse_limit, parse_user, quota},
};
use crate::{
    cli::{
        Exit, Output, Tool, ToolOutput,
        exit::exit_codes,
        options::parse_timeout,
        output::{Progress, json_line},
        report::ErrorSummary,
        run::{GRACE, fail, raise_file_limit, run_tool},
    },
    schema::{Named, VERSION, document},
    stamp,
    units::bytes,
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
#[command(after_help = exit_codes!("stopped by a signal"; 2 4 5))]
pub(in super::super) struct ServeOptions {
    /// Unix socket to listen on [default: $XDG_RUNTIME_DIR/vmmfd/broker.sock, else /tmp/vmmfd-UID/broker.sock]
    #[arg(long, value_name = "PATH", env = "VMMFD_BROKER_SOCKET", help_heading = "Meeting")]
    socket: Option<PathBuf>,

    /// User whose processes may connect, besides one's own and root: name or number; may be given several times
    #[arg(long = "allow-uid", value_name = "USER", value_parser = parse_user, help_heading = "Meeting")]
    allow_uids: Vec<u32>,

    /// Group whose users' processes may connect: name or number; may be given several times
    #[arg(long = "allow-gid", value_name = "GROUP", value_parser = parse_group, help_heading = "Meeting")]
    allow_gids: Vec<u32>,

    /// What each user may have: bytes and device-bytes (as claimed, with units), objects, leases, connections [default of users other than
    /// one's own and root: bytes=16TiB, device-bytes=2TiB, objects=20000, leases=100000, connections=10000]
    #[arg(long, value_name = "KEY=VALUE,...", value_delimiter = ',', value_parser = parse_limit, help_heading = "Meeting")]
    quota: Vec<Limit>,

    /// What all users together may have, with the same keys; each user may have half of what the others leave [default of users other
    /// than one's own and root: objects=100000, leases=400000]
    #[arg(long, value_name = "KEY=VALUE,...", value_delimiter = ',', value_parser = parse_limit, help_heading = "Meeting")]
    total_quota: Vec<Limit>,

    /// Set no limits: each user who may connect can then take all the room that the broker has
    #[arg(long, conflicts_with_all = ["quota", "total_quota"], help_heading = "Meeting")]
    no_quota: bool,

    /// File with more options, in one line VMMFD_OPTIONS="..."; it is read at each start of a server
    #[arg(long, value_name = "FILE", help_heading = "Meeting")]
    pub(in super::super) options_file: Option<PathBuf>,

    /// Check the options, the socket's path and whether the keeper answers, and start nothing
    #[arg(long, help_heading = "Meeting")]
    check: bool,

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
fn require_file_size() -> vmmfd::Result<()> {
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

#[derive(Debug, Serialize, JsonSchema)]
struct ServeReport {
    schema: u32,
    tool: String,
    socket: String,
    pid: u32,
    /// How many of each it held when it ended.
    objects: u64,
    versions: u64,
    leases: u64,
    size: u64,
}

/// What `vmmfd serve --check` reports.
#[derive(Debug, Serialize, JsonSchema)]
struct CheckReport {
    schema: u32,
    tool: String,
    /// Where the broker would listen.
    socket: String,
}

impl ServeOptions {
    /// Runs the keeper, or the server.
    pub(in super::super) fn start(self) -> ExitCode {
        if self.check {
            return run_tool(self);
        }
        // A reader that has stopped must not stop the broker.
        if let Err(error) = stderr::never_block_on_stderr() {
            return fail::<Self>(&Error::system("start a thread", error), self.output.json);
        }
        self.output.start_service_log();
        if let Some(path) = self.options_file.as_ref().filter(|path| !path.exists()) {
            tracing::info!(path = %path.display(), "there is no options file");
        }
        let code = self.run_role();
        stderr::flush_stderr();
        code
    }

    fn run_role(self) -> ExitCode {
        if Role::of_this_process().is_first()
            && let Err(error) = require_file_size()
        {
            return fail::<Self>(&error, self.output.json);
        }
        // Each descriptor that it holds counts.
        raise_file_limit();
        let has_own_keeper = !self.no_keeper && self.keeper.is_none();
        match keeper::begin_service(has_own_keeper, || self.path()) {
            Ok(ServiceProcess::Server(restart)) => run_tool(Self { restart, ..self }),
            Ok(ServiceProcess::Ended(code)) => ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX)),
            Err(error) => fail::<Self>(&error, self.output.json),
        }
    }

    /// Checks what can be checked without a start, and reports each problem.
    fn check(&self, cancel: &Cancel) -> anyhow::Result<ToolOutput> {
        let path = match &self.socket {
            Some(_) => self.path(),
            // Its folder is made by a start.
            None => default_broker_socket(),
        };
        let path = path.and_then(|path| check_socket(&path).map(|()| path));
        let keeper = self.keeper.iter().try_for_each(|path| keeper::check_reachable(path, cancel));
        let mut problems: Vec<Error> = [require_file_size().err(), keeper.err()].into_iter().flatten().collect();
        let path = path.map_err(|problem| problems.push(problem)).unwrap_or_default();
        let Some(last) = problems.pop() else {
            let report = CheckReport { schema: VERSION, tool: stamp::tool(), socket: path.display().to_string() };
            let text = match self.output.json {
                true => json_line(&report),
                false => format!("broker    checked    the options are good; the socket is {}\n", report.socket),
            };
            return Ok(ToolOutput { text, exit: Exit::Verified });
        };
        problems.iter().for_each(|problem| ErrorSummary::of(problem).complain());
        Err(last.into())
    }

    /// Where the broker listens. Once it does, nothing depends on the folder being there: it may have been removed.
    fn path(&self) -> vmmfd::Result<PathBuf> {
        match &self.socket {
            Some(path) if !Role::of_this_process().is_first() => Ok(path.clone()),
            given => broker_socket_path(given.as_deref()),
        }
    }
}

impl Tool for ServeOptions {
    const NAME: &'static str = "serve";

    const REPORTS: &'static [Named] = &[("serve", document::<ServeReport>), ("serve-check", document::<CheckReport>)];

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
        if self.check {
            return self.check(cancel);
        }
        let path = self.path()?;
        let unlimited = self.no_quota.then(Quota::unlimited);
        let mut config = ServerConfig::default();
        config.allow_uids.clone_from(&self.allow_uids);
        config.allow_gids.clone_from(&self.allow_gids);
        config.quota = unlimited.unwrap_or_else(|| quota(&self.quota));
        config.total_quota = unlimited.unwrap_or_else(|| quota(&self.total_quota));
        config.hold_devices = self.hold_devices;
        config.timeout = self.timeout;
        if self.emulated {
            config = emulated(config);
        }
        config.keeper = self.keeper.clone().map(KeeperPath::Socket);
        if let Some(restart) = &self.restart {
            config = started_by_keeper(config, restart.clone());
        }
        let server = Server::bind(&path, config, cancel)?;
        if Role::of_this_process().is_first() {
            notify("READY=1");
        }
        if !is_restarted(&server) {
            // A full disk behind it must not end a broker.
            let line = format!("broker    listening  {} as pid {}", server.path().display(), process::id());
            if let Err(error) = self.output.announce(line) {
                tracing::warn!(%error, "cannot write to standard output");
            }
        }
        let ended = server.run()?;
        if cancel.check().is_ok() && self.restart.as_ref().is_some_and(|restart| restart.check().is_err()) {
            return Ok(ToolOutput { text: String::new(), exit: Exit::Signal(libc::SIGHUP) });
        }
        let report = ServeReport {
            schema: VERSION,
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
