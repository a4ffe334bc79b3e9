//! `serve`: the broker.

use std::{
    io,
    process::{self, ExitCode},
};

use nix::sys::resource::{Resource, getrlimit};
use vmmfd::{
    broker::{KeeperPath, Quota, Server, ServerConfig},
    channel::broker_socket_path,
    internals::{
        MIN_FILE_LIMIT, TimeLimits, check_socket, default_broker_socket, emulated, keeper, leaving, notify,
        with_limits, with_own_keeper,
    },
};

use super::{
    count,
    values::{Limit, parse_group, parse_limit, parse_user, quota},
};
use crate::{
    cli::{
        Output,
        prelude::*,
        run::{GRACE, raise_file_limit, run_service, run_tool},
    },
    units::bytes,
};

/// Runs the broker, which keeps GPU memory under names
///
/// The broker needs no GPU and no driver: it holds the descriptors of the memory and hands them out. An object outlives its creator, until
/// it is deleted, its lifetime expires, or the broker stops. The broker runs until SIGTERM or SIGINT, and then exits with 0.
///
/// It starts a keeper, `vmmfd keeper`, which also holds the server's descriptors. The server replaces a killed keeper. After the server was
/// killed, start it again: it takes over from the keeper, and clients reconnect. Nothing is lost unless both die at once, which frees the
/// memory. SIGTERM and SIGINT end both. SIGHUP ends only the server, and the keeper holds everything for the next one, which may be a
/// newer program. With --keeper, an init owns the keeper, and the memory stays there whenever this process exits.
///
/// When the broker accepts connections, it prints one line, `broker    listening  PATH ...`, on stdout, or with --json on stderr: wait for
/// this line.
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("stopped by a signal"; 2 4 5))]
pub(in super::super) struct ServeOptions {
    /// Unix socket to listen on [default: $XDG_RUNTIME_DIR/vmmfd/broker.sock, else /tmp/vmmfd-UID/broker.sock]
    #[arg(long, value_name = "PATH", env = "VMMFD_BROKER_SOCKET", help_heading = "Meeting")]
    socket: Option<PathBuf>,

    /// Other user who may connect, besides this user and root: name or number; repeatable
    #[arg(long = "allow-uid", value_name = "USER", value_parser = parse_user, help_heading = "Meeting")]
    allow_uids: Vec<u32>,

    /// Group whose members may connect: name or number; repeatable
    #[arg(long = "allow-gid", value_name = "GROUP", value_parser = parse_group, help_heading = "Meeting")]
    allow_gids: Vec<u32>,

    /// Limits of each user: bytes and device-bytes (as claimed, with units), objects, leases, connections [default for users except this
    /// user and root: bytes=16TiB, device-bytes=2TiB, objects=20000, leases=100000, connections=10000]
    #[arg(long, value_name = "KEY=VALUE,...", value_delimiter = ',', value_parser = parse_limit, help_heading = "Meeting")]
    quota: Vec<Limit>,

    /// Limits of all users together, with the same keys [default: objects=100000, leases=400000]
    #[arg(long, value_name = "KEY=VALUE,...", value_delimiter = ',', value_parser = parse_limit, help_heading = "Meeting")]
    total_quota: Vec<Limit>,

    /// Set no limits: a single user can then exhaust the broker
    #[arg(long, conflicts_with_all = ["quota", "total_quota"], help_heading = "Meeting")]
    no_quota: bool,

    /// File with more options, in one line VMMFD_OPTIONS="..."; read at each start of a server
    #[arg(long, value_name = "FILE", help_heading = "Meeting")]
    pub(in super::super) options_file: Option<PathBuf>,

    /// Check the options, the socket's path, which no broker may serve, and the connection to the keeper, and start nothing
    #[arg(long, help_heading = "Meeting")]
    check: bool,

    /// Longest silence of a client during a request: 500ms, 30s, 2m
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = parse_timeout, help_heading = "Meeting")]
    timeout: Duration,

    /// Unix socket of a running `vmmfd keeper`, which holds this server's objects if it stops or is killed
    #[arg(long, value_name = "PATH", conflicts_with = "no_keeper", help_heading = "Meeting")]
    keeper: Option<PathBuf>,

    /// Run without a keeper: all objects are lost if the server is killed
    #[arg(long, help_heading = "Meeting")]
    no_keeper: bool,

    /// Hold /dev/nvidia0 etc. open: the driver then keeps the memory even if persistence is off
    #[arg(long, help_heading = "Meeting")]
    hold_devices: bool,

    /// Accept host memory as GPU memory: for tests with the emulated driver
    #[arg(long, hide = true, help_heading = "Meeting")]
    emulated: bool,

    /// A time limit other than the server's own: for tests that wait for it
    #[arg(long, hide = true, value_name = "NAME=DURATION", value_parser = parse_time_limit, help_heading = "Meeting")]
    time_limit: Vec<(String, Duration)>,

    /// Cancelled by SIGHUP, if there is a keeper.
    #[arg(skip)]
    leave: Option<Cancel>,
}

/// The time limit of a server's shutdown: 10 s for the keeper to receive everything, and the rest for closing descriptors.
const END: Duration = Duration::from_secs(13);

fn parse_time_limit(text: &str) -> Result<(String, Duration), String> {
    let (name, limit) = text.split_once('=').ok_or("write NAME=DURATION")?;
    let limit = parse_timeout(limit)?;
    match TimeLimits::default().set(name, limit) {
        true => Ok((name.to_owned(), limit)),
        false => Err(format!("there is no time limit `{name}`")),
    }
}

/// Raises the open-file limit. Fails if the broker could hold no object.
fn require_files() -> Result<()> {
    raise_file_limit();
    let (limit, _) =
        getrlimit(Resource::RLIMIT_NOFILE).map_err(|errno| Error::system("read the limit of open files", errno))?;
    if limit < MIN_FILE_LIMIT as u64 {
        let reason = format!(
            "this process may open {limit} files (RLIMIT_NOFILE), and a broker that holds an object needs {MIN_FILE_LIMIT}: use \
             `ulimit -n 65536`, or LimitNOFILE=65536 in the unit"
        );
        return Err(Error::system("serve", io::Error::other(reason)));
    }
    Ok(())
}

#[derive(Debug, Serialize, JsonSchema)]
struct ServeReport {
    socket: String,
    pid: u32,
    /// The contents at shutdown.
    objects: u64,
    versions: u64,
    leases: u64,
    size: u64,
}

/// The report of `--check`.
#[derive(Debug, Serialize, JsonSchema)]
struct CheckReport {
    /// The path that the broker would listen on.
    socket: String,
}

impl ServeOptions {
    /// Runs the server.
    pub(in super::super) fn start(self, output: &Output) -> ExitCode {
        if self.check {
            return run_tool(self, output);
        }
        run_service(Self::NAME, output, || {
            output.start_broker_log();
            if let Some(path) = self.options_file.as_ref().filter(|path| !path.exists()) {
                tracing::info!(path = %path.display(), "there is no options file");
            }
            require_files()?;
            let leave = if self.no_keeper { None } else { Some(Cancel::new()?) };
            Ok(run_tool(Self { leave, ..self }, output))
        })
    }

    /// Checks the configuration without starting the broker, and reports each problem.
    fn check(&self, output: &Output, cancel: &Cancel) -> anyhow::Result<ToolOutput> {
        let path = match &self.socket {
            Some(_) => self.path(),
            // The folder may be absent: the broker creates it at start.
            None => default_broker_socket(),
        };
        let path = path.and_then(|path| check_socket(&path).map(|()| path));
        let keeper = self.keeper.iter().try_for_each(|path| keeper::check_reachable(path, cancel));
        let mut problems: Vec<Error> = [require_files().err(), keeper.err()].into_iter().flatten().collect();
        let path = path.map_err(|problem| problems.push(problem)).unwrap_or_default();
        let Some(last) = problems.pop() else {
            let text = |report: &CheckReport, _| {
                format!("broker    checked    the options are good; the socket is {}\n", report.socket)
            };
            return Ok(ToolOutput::of(
                output,
                Exit::Verified,
                CheckReport { socket: path.display().to_string() },
                text,
            ));
        };
        problems.iter().for_each(|problem| ErrorSummary::of(problem).complain());
        Err(last.into())
    }

    fn path(&self) -> Result<PathBuf> {
        broker_socket_path(self.socket.as_deref())
    }
}

impl Tool for ServeOptions {
    const NAME: &'static str = "serve";

    const REPORTS: &'static [Named] =
        &[("serve", document::<Stamped<ServeReport>>), ("serve-check", document::<Stamped<CheckReport>>)];

    fn on_hangup(&self) -> Option<&Cancel> {
        self.leave.as_ref()
    }

    fn grace(&self) -> Duration {
        // With --keeper, the server waits until the keeper has everything.
        if self.keeper.is_some() { GRACE + END } else { GRACE }
    }

    fn run(&self, Running { output, cancel, .. }: Running<'_>) -> anyhow::Result<ToolOutput> {
        if self.check {
            return self.check(output, cancel);
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
        let mut limits = TimeLimits::default();
        for (name, limit) in &self.time_limit {
            limits.set(name, *limit);
        }
        config = with_limits(config, limits);
        config.keeper = self.keeper.clone().map(KeeperPath::Socket);
        if self.keeper.is_none() && !self.no_keeper {
            config = with_own_keeper(config, output.arguments());
        }
        if let Some(leave) = &self.leave {
            config = leaving(config, leave.clone());
        }
        let server = Server::bind(&path, config, cancel)?;
        notify("READY=1");
        let line = format!("broker    listening  {} as pid {}", server.path().display(), process::id());
        // A full disk must not stop the broker.
        if let Err(error) = output.announce(line) {
            tracing::warn!(%error, "cannot write to standard output");
        }
        let ended = server.run()?;
        let report = ServeReport {
            socket: path.display().to_string(),
            pid: process::id(),
            objects: ended.objects,
            versions: ended.versions,
            leases: ended.leases,
            size: ended.bytes,
        };
        Ok(ToolOutput::of(output, Exit::Verified, report, render))
    }
}

fn render(report: &ServeReport, _verbose: bool) -> String {
    let objects = count(report.objects, "object");
    let versions = count(report.versions, "version");
    let size = bytes(report.size);
    let leases = count(report.leases, "lease");
    format!("broker    ended      with {objects}, {versions}, {size} as claimed, {leases}\n")
}
