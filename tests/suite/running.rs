//! Runs the commands as processes: starts them, waits for them, and always kills them.

#![allow(unsafe_code, reason = "a child asks the kernel to be killed with its parent")]

use std::{
    process::{Child, ExitStatus},
    thread::JoinHandle,
};

use nix::sys::{
    prctl,
    resource::{Resource, setrlimit},
};

use crate::support::{pause, prelude::*, schema::mismatch, session};

/// The time limit of every wait. It allows for a slow machine under load.
const PATIENCE: Duration = Duration::from_secs(600);

/// One hour, for hanging calls of the emulated driver: longer than any test waits.
pub(crate) const HANGS: &str = "3600000";

/// Polls until another process has done something.
#[track_caller]
pub(crate) fn wait_for(what: &str, mut there: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !there() {
        assert!(begun.elapsed() < PATIENCE, "{what} never came");
        pause(begun);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum On {
    Host,
    /// The CUDA backend on the emulated driver.
    Fake,
    /// The CUDA backend on this machine's driver.
    Cuda,
}

/// A folder with the socket of two commands. Dropping it deletes the folder.
pub(crate) struct Meeting {
    on: On,
    folder: TempDir,
    driver: Option<Copy>,
    binaries: Option<TempDir>,
}

impl Meeting {
    pub(crate) fn new(on: On) -> Self {
        let driver = (on == On::Fake).then(|| {
            let copy = Copy::new();
            copy.write("libcuda.so.1");
            copy
        });
        Self { on, folder: tempfile::tempdir().unwrap(), driver, binaries: None }
    }

    pub(crate) fn host() -> Self {
        Self::new(On::Host)
    }

    pub(crate) fn fake() -> Self {
        Self::new(On::Fake)
    }

    pub(crate) fn cuda() -> Self {
        Self::new(On::Cuda)
    }

    /// Returns another folder for the same backend.
    pub(crate) fn another(&self) -> Self {
        Self::new(self.on)
    }

    pub(crate) fn is_fake(&self) -> bool {
        self.on == On::Fake
    }

    /// Copies the commands to a folder that every user can access. Later runs use the copies.
    pub(crate) fn copy_binaries(&mut self) {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
        // Copy in another process: a concurrently forked child would inherit this process's write descriptor, and a program that is open
        // for writing cannot be executed (ETXTBSY).
        let binaries = ["producer", "consumer", "vmmfd"].map(binary);
        assert!(Command::new("cp").arg("-p").args(binaries).arg(folder.path()).status().unwrap().success());
        self.binaries = Some(folder);
    }

    pub(crate) fn backend(&self) -> &'static str {
        if self.on == On::Host { "host" } else { "cuda" }
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the folder of the emulated driver, if it is used.
    pub(crate) fn driver_folder(&self) -> Option<&Path> {
        self.driver.as_ref().map(Copy::folder)
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder().join("s.sock")
    }

    /// `producer` with this backend and socket.
    pub(crate) fn producer(&self, options: &[&str]) -> Run {
        self.command("producer", options)
    }

    /// `producer` with this backend and socket, once it listens.
    #[track_caller]
    pub(crate) fn listening(&self, options: &[&str]) -> Running {
        let mut producer = self.producer(options).start();
        producer.until("shared");
        producer
    }

    /// Runs a producer and a consumer to their ends.
    pub(crate) fn pair(&self, producer: &[&str], consumer: &[&str]) -> (Ended, Ended) {
        let producer = self.producer(producer).start();
        let consumer = self.consumer(consumer).end();
        (producer.end(), consumer)
    }

    /// `consumer` with this backend and socket.
    pub(crate) fn consumer(&self, options: &[&str]) -> Run {
        self.command("consumer", options)
    }

    fn command(&self, name: &'static str, options: &[&str]) -> Run {
        let mut run = self.bare(name);
        run.command.arg("--socket").arg(self.socket()).args(["--backend", self.backend()]).args(options);
        run
    }

    /// A command without options. Its environment selects this backend's driver.
    pub(crate) fn bare(&self, name: &'static str) -> Run {
        let mut run = Run::new(name, self.binaries.as_ref().map(|folder| folder.path().join(name)));
        match &self.driver {
            Some(driver) => run.command.env("LD_LIBRARY_PATH", driver.folder()),
            None if self.on == On::Host => run.command.env_remove("LD_LIBRARY_PATH"),
            None => &mut run.command,
        };
        run
    }

    /// Lists the processes whose environment contains this folder.
    pub(crate) fn processes(&self) -> Vec<PathBuf> {
        let folder = self.folder().to_str().unwrap().as_bytes();
        let entries = fs::read_dir("/proc").unwrap().filter_map(|entry| Some(entry.ok()?.path()));
        let here = |process: &PathBuf| {
            let name = process.file_name().unwrap_or_default();
            let environment = fs::read(process.join("environ")).unwrap_or_default();
            name.as_encoded_bytes().iter().all(u8::is_ascii_digit)
                && environment.windows(folder.len()).any(|part| part == folder)
        };
        entries.filter(here).collect()
    }

    /// Lists the files in the folder.
    pub(crate) fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder()).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}

/// A command that is not started yet.
pub(crate) struct Run {
    name: &'static str,
    pub(crate) command: Command,
}

impl Run {
    fn new(name: &'static str, path: Option<PathBuf>) -> Self {
        let mut command = Command::new(path.unwrap_or_else(|| binary(name)));
        for variable in ["VMMFD_SOCKET", "VMMFD_BROKER_SOCKET", "VMMFD_BACKEND", "XDG_RUNTIME_DIR", "NO_COLOR"] {
            command.env_remove(variable);
        }
        command.env("LC_ALL", "C.UTF-8");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self { name, command }
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<std::ffi::OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Runs another program, which then runs the command.
    pub(crate) fn instead(mut self, mut command: Command) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        self.command = command;
        self
    }

    pub(crate) fn stdout(mut self, to: impl Into<Stdio>) -> Self {
        self.command.stdout(to);
        self
    }

    /// Sets RLIMIT_NOFILE.
    pub(crate) fn with_files(self, limit: u64) -> Self {
        self.with_limit(Resource::RLIMIT_NOFILE, limit)
    }

    pub(crate) fn with_limit(mut self, resource: Resource, limit: u64) -> Self {
        // SAFETY: setrlimit is a plain system call, safe between fork and exec.
        unsafe {
            self.command.pre_exec(move || setrlimit(resource, limit, limit).map_err(io::Error::from));
        }
        self
    }

    /// The name of the schema of the command's report, unless another program runs the command.
    fn report(&self) -> Option<String> {
        let arguments: Vec<&str> = self.command.get_args().filter_map(|argument| argument.to_str()).collect();
        match (self.name, *arguments.first()?) {
            ("producer", _) => Some("produce".to_owned()),
            ("consumer", _) => Some("consume".to_owned()),
            (_, "doctor") if arguments.contains(&"--list") => Some("doctor-list".to_owned()),
            (_, "serve") if arguments.contains(&"--check") => Some("serve-check".to_owned()),
            (_, command) => (!command.starts_with('-')).then(|| command.to_owned()),
        }
    }

    pub(crate) fn start(mut self) -> Running {
        // If the tests are killed, programs without a time limit are killed too. For other programs a fork, which copies the page tables of
        // this process with all its tests, would be a waste.
        let endless = ["serve", "keeper", "exporter", "watch", "pub", "sub"];
        if self.command.get_args().any(|argument| endless.iter().any(|command| argument == *command)) {
            // SAFETY: prctl is a plain system call, safe between fork and exec.
            unsafe {
                self.command.pre_exec(|| Ok(prctl::set_pdeathsig(Signal::SIGKILL)?));
            }
        }
        // A broker's keeper outlives its server.
        let is_broker = self.command.get_args().next().is_some_and(|first| first == "serve");
        let session = is_broker.then(|| session::lead(&mut self.command));
        let (report, started) = (self.report(), Instant::now());
        let mut child = self.command.spawn().unwrap_or_else(|error| panic!("{}: {error}", self.name));
        let stdout = Lines::of(child.stdout.take());
        let stderr = Lines::of(child.stderr.take());
        Running { name: self.name, report, child, session, stdout, stderr, started }
    }

    pub(crate) fn end(self) -> Ended {
        self.start().end()
    }
}

/// Writes files into a folder that hide this machine's driver if the loader searches the folder first.
pub(crate) fn hide_driver(folder: &Path) {
    for name in ["libcuda.so.1", "libcuda.so"] {
        fs::write(folder.join(name), "no library").unwrap();
    }
}

/// Asserts that a program accepts these arguments: a final `--help` makes it only parse them.
#[track_caller]
pub(crate) fn understood(program: &str, arguments: &[String]) {
    let name = ["producer", "consumer", "vmmfd"].into_iter().find(|name| *name == program).unwrap();
    let mut run = Meeting::host().bare(name);
    run.command.args(arguments).arg("--help");
    run.end().code(0);
}

/// Returns the path of a command: in `VMMFD_BIN`, beside the test program, or in its parent folder (cargo's layout). Cargo rebuilds the
/// programs of this package, but `vmmfd-bench` only on request: a stale program fails the test.
#[track_caller]
pub(crate) fn binary(name: &str) -> PathBuf {
    let beside = env::current_exe().unwrap().parent().unwrap().to_owned();
    let folders =
        [env::var_os("VMMFD_BIN").map(PathBuf::from), Some(beside.clone()), beside.parent().map(Path::to_owned)];
    let found = folders.into_iter().flatten().map(|folder| folder.join(name)).find(|path| path.is_file());
    let found = found.unwrap_or_else(|| panic!("no {name} beside {}, and none in $VMMFD_BIN", beside.display()));
    assert!(!is_stale(&found), "{} is older than its library: build the workspace", found.display());
    found
}

/// Reports whether cargo has rebuilt the library of a program's package, but not the program. A bundle has no library.
fn is_stale(program: &Path) -> bool {
    let modified = |path: &Path| fs::metadata(path).and_then(|file| file.modified()).ok();
    let library = format!("lib{}-", program.file_name().unwrap().to_string_lossy().replace('-', "_"));
    // The library `vmmfd` belongs to a different package than the program.
    if library == "libvmmfd-" {
        return false;
    }
    let built = fs::read_dir(program.with_file_name("deps")).into_iter().flatten().flatten();
    let built = built.filter(|file| {
        let name = file.file_name().to_string_lossy().into_owned();
        name.starts_with(&library) && name.ends_with(".rlib")
    });
    built.filter_map(|file| modified(&file.path())).max() > modified(program)
}

/// Collects the output of a process while it runs.
struct Lines {
    text: Arc<Mutex<String>>,
    reader: Option<JoinHandle<()>>,
}

impl Lines {
    fn of(pipe: Option<impl Read + Send + 'static>) -> Self {
        let text = Arc::new(Mutex::new(String::new()));
        let reader = pipe.map(|mut pipe| {
            let text = Arc::clone(&text);
            thread::spawn(move || {
                let mut bytes = [0; 4096];
                while let Ok(length @ 1..) = pipe.read(&mut bytes) {
                    text.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..length]));
                }
            })
        });
        Self { text, reader }
    }

    fn so_far(&self) -> String {
        self.text.lock().unwrap().clone()
    }

    /// Reports whether the process and its children have closed the pipe.
    fn is_whole(&self) -> bool {
        self.reader.as_ref().is_none_or(JoinHandle::is_finished)
    }

    fn all(&mut self) -> String {
        if let Some(reader) = self.reader.take() {
            reader.join().unwrap();
        }
        self.so_far()
    }
}

/// A running command. Dropping it kills the process.
pub(crate) struct Running {
    name: &'static str,
    report: Option<String>,
    child: Child,
    /// Whether the command is a broker, which leads a session.
    session: Option<session::Mark>,
    stdout: Lines,
    stderr: Lines,
    started: Instant,
}

impl Running {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    /// Waits until SIGTERM is blocked or has a handler.
    pub(crate) fn until_it_handles_signals(&self) {
        let handled = |line: &str| {
            let (name, mask) = line.split_once(":\t")?;
            let mask = ["SigBlk", "SigCgt"].contains(&name).then(|| u64::from_str_radix(mask, 16).unwrap())?;
            Some(mask & 1 << (Signal::SIGTERM as u32 - 1) != 0)
        };
        wait_for("the handling of signals", || {
            let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
            status.lines().any(|line| handled(line) == Some(true))
        });
    }

    /// Waits until the command has printed a line whose first or second word is `step`.
    #[track_caller]
    pub(crate) fn until(&mut self, step: &str) {
        let begun = Instant::now();
        let printed = |text: &str| text.lines().any(|line| line.split_whitespace().take(2).any(|word| word == step));
        while !printed(&self.stdout.so_far()) {
            // After the exit, the reader may still have output to read.
            let ended = self.child.try_wait().unwrap().is_some() && self.stdout.is_whole();
            let running = !ended || printed(&self.stdout.so_far());
            let never = || format!("{} never came to `{step}`: {}", self.name, self.so_far());
            assert!(running && begun.elapsed() < PATIENCE, "{}", never());
            pause(begun);
        }
    }

    pub(crate) fn so_far(&self) -> String {
        format!("{}\n{}", self.stdout.so_far(), self.stderr.so_far())
    }

    pub(crate) fn end(mut self) -> Ended {
        let begun = Instant::now();
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break status,
                None if begun.elapsed() > PATIENCE => panic!("{} does not end: {}", self.name, self.so_far()),
                None => pause(begun),
            }
        };
        let took = self.started.elapsed();
        Ended {
            name: self.name,
            report: self.report.clone(),
            status,
            stdout: self.stdout.all(),
            stderr: self.stderr.all(),
            took,
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mark) = &self.session {
            session::end(&mut self.child, mark);
        }
        // Both calls fail if the process has exited and was reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Checks a report against its schema.
#[track_caller]
pub(crate) fn fits(name: &str, value: &Value) {
    if let Some(what) = mismatch(&schema_of(name), value) {
        panic!("{name}: {what}: {value}");
    }
}

/// The schema that `vmmfd schema` prints.
#[track_caller]
pub(crate) fn schema_of(name: &str) -> Value {
    static SCHEMAS: Mutex<BTreeMap<String, Value>> = Mutex::new(BTreeMap::new());
    let known = SCHEMAS.lock().unwrap().get(name).cloned();
    known.unwrap_or_else(|| {
        let printed = Command::new(binary("vmmfd")).args(["schema", name]).output().unwrap();
        let schema: Value = serde_json::from_slice(&printed.stdout).unwrap_or_else(|error| panic!("{name}: {error}"));
        SCHEMAS.lock().unwrap().insert(name.to_owned(), schema.clone());
        schema
    })
}

/// A command that has exited.
pub(crate) struct Ended {
    name: &'static str,
    report: Option<String>,
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) took: Duration,
}

impl Ended {
    /// Asserts the exit code. A failure prints the whole output.
    #[track_caller]
    pub(crate) fn code(&self, code: i32) -> &Self {
        let name = self.name;
        let stdout = &self.stdout;
        let stderr = &self.stderr;
        assert_eq!(self.status.code(), Some(code), "{name}: {:?}\n{stdout}\n{stderr}", self.status);
        self
    }

    /// Returns the single JSON object of `--json`. Other output fails the test, and so does an object that differs from its schema.
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        assert_eq!(self.stdout.lines().count(), 1, "{} {}", self.stdout, self.stderr);
        let value: Value =
            serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {}", self.stdout));
        match &self.report {
            _ if value.get("command").is_some() => fits("failure", &value),
            Some(report) => fits(report, &value),
            None => assert!(value["schema"].is_u64(), "{value}"),
        }
        value
    }

    /// Asserts that standard error contains `words`.
    #[track_caller]
    pub(crate) fn says(&self, words: &str) -> &Self {
        assert!(self.stderr.contains(words), "{} does not say `{words}`: {}", self.name, self.stderr);
        self
    }
}
