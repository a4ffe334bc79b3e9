//! The broker as two units of a real systemd, under load: `make test-systemd` boots that and runs this beside it.
//!
//! Four writers replace an object each and four readers get them, while server and keeper are killed, restarted, stopped and
//! upgraded. No put that was acknowledged may be lost, and no call may fail. Exits with 1 if one did.
//!
//! | Variable | |
//! |---|---|
//! | `VMMFD_TEST_SOCKET` | the broker's socket, as this process reaches it |
//! | `VMMFD_TEST_IN` | a command that runs the shell command behind it in the booted system |
//! | `VMMFD_TEST_PACKAGES` | packages to install in turn, as paths there |
//! | `VMMFD_TEST_KILLS`, `VMMFD_TEST_RESTARTS` | how many kills, and how many of the other events, of each kind: 50, 20 |
//! | `VMMFD_TEST_FIGURES` | set: measure puts without a fault, and end |
//! | `VMMFD_TEST_SEGMENTS` | how many segments the large store has: 30,000, for which `fs.nr_open` must be larger |

use std::{
    env,
    os::fd::AsFd,
    process::{Command, ExitCode, Output},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use vmmfd::{
    broker::{Client, Condition, Get, Put, PutPart},
    driver::{Backend, Choice, Driver, open},
    memory::{Device, Region, Selector, Shared, Sharing, Spec},
    session::Config,
};

const WRITERS: usize = 4;

/// After how long a wait fails the test.
const PATIENCE: Duration = Duration::from_secs(120);

/// How many segments an object of many has.
const SEGMENTS: usize = 3_750;

/// Descriptors that the broker keeps for other things than segments.
const SPARE: usize = 1_000;

/// What is known of the load.
#[derive(Default)]
struct Load {
    /// The last acknowledged number of each writer.
    acknowledged: [AtomicU64; WRITERS],
    gets: AtomicU64,
    longest_us: AtomicU64,
    failures: Mutex<Vec<String>>,
    ends: AtomicBool,
}

impl Load {
    fn fail(&self, text: String) {
        eprintln!("test-systemd: FAILED: {text}");
        self.failures.lock().unwrap().push(text);
    }

    fn puts(&self) -> u64 {
        self.acknowledged.iter().map(|of| of.load(Ordering::Acquire)).sum()
    }

    fn longest_ms(&self) -> f64 {
        self.longest_us.load(Ordering::Acquire) as f64 / 1e3
    }

    /// Waits until each writer had two puts acknowledged, of which one began after this call.
    fn settle(&self, after: &str) {
        let before: Vec<u64> = self.acknowledged.iter().map(|of| of.load(Ordering::Acquire)).collect();
        let begun = Instant::now();
        while self.acknowledged.iter().zip(&before).any(|(of, before)| of.load(Ordering::Acquire) < before + 2) {
            if begun.elapsed() > PATIENCE {
                return self.fail(format!("no put is acknowledged after {after}"));
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}

fn number(name: &str, default: usize) -> usize {
    env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}: {text}")))
}

fn client() -> Client {
    let path = env::var_os("VMMFD_TEST_SOCKET").expect("VMMFD_TEST_SOCKET");
    let begun = Instant::now();
    loop {
        match Client::connect(path.as_ref(), &Config::default().timeout(PATIENCE)) {
            Ok(client) => return client,
            Err(error) => assert!(begun.elapsed() < PATIENCE, "{}", error.in_full()),
        }
        thread::sleep(Duration::from_millis(10));
    }
}

fn driver() -> Driver {
    open(Choice::Only(Backend::Host)).unwrap().driver
}

/// Runs a shell command in the booted system.
fn run(command: &str) -> Output {
    let prefix = env::var("VMMFD_TEST_IN").expect("VMMFD_TEST_IN");
    let mut words = prefix.split(' ');
    let mut process = Command::new(words.next().unwrap());
    process.args(words).args(["sh", "-c", command]).output().unwrap()
}

/// How often the server and the keeper came to hold the same, as the journal says: a new keeper was sent everything, or a new server has
/// taken over everything.
fn resends() -> usize {
    let lines = "-e 'descriptors of the server are held' -e 'reactor: serving'";
    let output = run(&format!("journalctl -u vmmfd-keeper -u vmmfd -o cat --no-pager | grep -c {lines}"));
    String::from_utf8_lossy(&output.stdout).trim().parse().unwrap_or(0)
}

/// Waits until the next keeper, or the next server, has everything. Before that, puts may be acknowledged while the server alone has them: those that the
/// old keeper's socket took before its end was seen.
fn wait_for_resend(load: &Load, before: usize) {
    let begun = Instant::now();
    while resends() <= before {
        if begun.elapsed() > PATIENCE {
            return load.fail("no keeper was sent everything".to_owned());
        }
        thread::sleep(Duration::from_millis(10));
    }
}

fn say(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn filled(driver: &Driver, number: u64) -> Shared {
    let device = Device::find(driver, Selector::default()).unwrap();
    let memory = Shared::create(&device, Spec::vmm(4096)).unwrap();
    memory.copy_in(0, &number.to_le_bytes()).unwrap();
    memory
}

fn write(load: &Load, writer: usize) {
    let (driver, client) = (driver(), client());
    let name = format!("load/{writer}");
    let first = load.acknowledged[writer].load(Ordering::Acquire) + 1;
    for number in first.. {
        if load.ends.load(Ordering::Acquire) {
            return;
        }
        let memory = filled(&driver, number);
        let put = Put::new(&name).condition(Condition::Any).part(PutPart::of("all", &memory).unwrap());
        let begun = Instant::now();
        match client.put(&put) {
            Ok(_) => load.acknowledged[writer].store(number, Ordering::Release),
            Err(error) => return load.fail(format!("put {number} of {name}: {}", error.in_full())),
        }
        load.longest_us.fetch_max(begun.elapsed().as_micros() as u64, Ordering::AcqRel);
    }
}

/// The number in an object.
fn read(client: &Client, driver: &Driver, name: &str) -> vmmfd::Result<u64> {
    let object = client.get(&Get::new(name))?.open(driver, None)?;
    let mut bytes = [0; 8];
    object.part("all").expect("the part that was put").memory()?.copy_out(0, &mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

fn get(load: &Load, writer: usize) {
    let (driver, client) = (driver(), client());
    let name = format!("load/{writer}");
    while !load.ends.load(Ordering::Acquire) {
        let before = load.acknowledged[writer].load(Ordering::Acquire);
        if before == 0 {
            thread::sleep(Duration::from_millis(1));
            continue;
        }
        match read(&client, &driver, &name) {
            Ok(number) if number >= before => {}
            Ok(number) => load.fail(format!("{name} has {number}, and {before} was acknowledged")),
            Err(error) => return load.fail(format!("get of {name}: {}", error.in_full())),
        }
        load.gets.fetch_add(1, Ordering::AcqRel);
    }
}

/// Runs a command in the system under load, and waits until puts are acknowledged after it. Returns the command's own time.
fn disturb(load: &Load, label: &str, command: &str) -> Duration {
    let replaces = command.contains("vmmfd-keeper");
    let before = if replaces { resends() } else { 0 };
    let begun = Instant::now();
    let output = run(command);
    let ran = begun.elapsed();
    if !output.status.success() {
        load.fail(format!("{command}: {}", say(&output)));
    }
    if replaces {
        wait_for_resend(load, before);
    }
    load.settle(label);
    ran
}

/// Runs a command in the system so often, under load, and prints what came of it.
fn repeat(load: &Load, label: &str, times: usize, command: impl Fn(usize) -> String) {
    load.longest_us.store(0, Ordering::Release);
    let (begun, before) = (Instant::now(), load.puts());
    (0..times).for_each(|round| drop(disturb(load, label, &command(round))));
    let (puts, seconds) = (load.puts() - before, begun.elapsed().as_secs_f64());
    println!("{label}: {times} times in {seconds:.1} s, {puts} puts, the longest {:.1} ms", load.longest_ms());
}

/// The time of a put without a fault, in microseconds: the median.
fn put_us() -> u64 {
    let (driver, client) = (driver(), client());
    let memory = filled(&driver, 1);
    let put = Put::new("quiet").condition(Condition::Any).part(PutPart::of("all", &memory).unwrap());
    let mut times: Vec<u64> = (0..3000)
        .map(|_| {
            let begun = Instant::now();
            client.put(&put).unwrap();
            begun.elapsed().as_micros() as u64
        })
        .collect();
    times.sort_unstable();
    times[times.len() / 2]
}

/// Puts objects of many segments, all the same memory.
fn put_many(objects: usize) {
    let (driver, client) = (driver(), client());
    let shared = filled(&driver, 7);
    let mut description = shared.describe().unwrap();
    let unit = description.mapped_size;
    (description.size, description.mapped_size) = (unit * SEGMENTS as u64, unit * SEGMENTS as u64);
    if let Sharing::Vmm { segments, .. } = &mut description.sharing {
        *segments = SEGMENTS as u64;
    }
    let (_, chunks) = shared.chunks(0..shared.size()).unwrap().expect("memory of segments");
    for object in 0..objects {
        let segments = (0..SEGMENTS).map(|_| (unit, chunks[0].as_fd()));
        let part = PutPart::of_segments("all", Backend::Host, description.clone(), segments).unwrap();
        client.put(&Put::new(format!("many/{object}")).part(part)).unwrap();
    }
}

fn events(load: &Load, kills: usize, restarts: usize) {
    let kill = |unit: &str| format!("systemctl kill -s KILL --kill-whom=main {unit}");
    repeat(load, "SIGKILL of the server", kills, |_| kill("vmmfd"));
    repeat(load, "SIGKILL of the keeper", kills, |_| kill("vmmfd-keeper"));
    repeat(load, "SIGKILL of both in turn", kills, |round| kill(["vmmfd", "vmmfd-keeper"][round % 2]));
    repeat(load, "restart of the server", restarts, |_| "systemctl restart vmmfd".to_owned());
    repeat(load, "restart of the keeper", restarts, |_| "systemctl restart vmmfd-keeper".to_owned());
    repeat(load, "restart of the keeper, then of the server", restarts, |_| {
        "systemctl restart vmmfd-keeper && systemctl restart vmmfd".to_owned()
    });
    // The keeper may get SIGTERM while no server is connected.
    repeat(load, "SIGHUP to the server, and restart of the keeper", restarts, |_| {
        "systemctl kill -s HUP --kill-whom=main vmmfd && systemctl restart vmmfd-keeper".to_owned()
    });
    repeat(load, "stop and start of the server", restarts, |_| {
        "systemctl stop vmmfd && systemctl start vmmfd".to_owned()
    });
    repeat(load, "stop and start of the keeper", restarts, |_| {
        "systemctl stop vmmfd-keeper && systemctl start vmmfd-keeper".to_owned()
    });
    repeat(load, "daemon-reexec", restarts, |_| "systemctl daemon-reexec".to_owned());
    let packages = env::var("VMMFD_TEST_PACKAGES").unwrap_or_default();
    let packages: Vec<&str> = packages.split_whitespace().collect();
    if packages.is_empty() {
        println!("dpkg -i: LEFT OUT, as there is no package");
    } else {
        repeat(load, "dpkg -i", restarts, |round| format!("dpkg -i {}", packages[round % packages.len()]));
    }
}

/// Sets a flag when it is dropped.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

fn many(load: &Load) {
    let wanted = number("VMMFD_TEST_SEGMENTS", 30_000);
    let room = client().metrics().unwrap().descriptors;
    let free = room.allowed.saturating_sub(room.used) as usize;
    let objects = wanted.min(free.saturating_sub(SPARE)) / SEGMENTS;
    if objects < wanted / SEGMENTS {
        println!(
            "{wanted} segments: LEFT OUT, {} instead, as a unit may have {} files here",
            objects * SEGMENTS,
            room.allowed
        );
    }
    put_many(objects);
    let timed = |label: &str, command: &str| {
        load.longest_us.store(0, Ordering::Release);
        let ran = disturb(load, label, command);
        let (segments, longest) = (objects * SEGMENTS, load.longest_ms());
        println!("{label}, with {segments} segments: the command took {ran:.2?}, the longest put {longest:.1} ms");
    };
    timed("restart of the server", "systemctl restart vmmfd");
    timed("restart of the keeper, then of the server", "systemctl restart vmmfd-keeper && systemctl restart vmmfd");
    timed(
        "the keeper killed in a resend",
        "kill='systemctl kill -s KILL --kill-whom=main vmmfd-keeper'; $kill; sleep 0.05; $kill; true",
    );
    timed("SIGKILL of the server", "systemctl kill -s KILL --kill-whom=main vmmfd");
    let client = client();
    let there = client.list("many/").unwrap().len();
    if there != objects {
        load.fail(format!("{there} of {objects} objects with many segments are there"));
    }
    for object in 0..objects {
        client.delete(&format!("many/{object}")).unwrap();
    }
}

/// Bad options fail the unit visibly, and a stopped server is replaced.
fn faults(load: &Load) {
    load.ends.store(true, Ordering::Release);
    run("echo 'VMMFD_OPTIONS=--nonsense' >/etc/default/vmmfd; systemctl restart vmmfd");
    let begun = Instant::now();
    loop {
        let said = say(&run("systemctl is-failed vmmfd; systemctl status vmmfd --no-pager"));
        if said.starts_with("failed") && said.contains("--nonsense") {
            println!("bad options: the unit is failed, and its status has the error");
            break;
        }
        if begun.elapsed() > PATIENCE {
            return load.fail(format!("bad options: {said}"));
        }
        thread::sleep(Duration::from_millis(100));
    }
    run("rm /etc/default/vmmfd; systemctl start vmmfd");
    let begun = Instant::now();
    run("systemctl kill -s STOP --kill-whom=main vmmfd");
    let _ = client();
    println!("a stopped server: another one serves after {:.1} s", begun.elapsed().as_secs_f64());
    run("systemctl kill -s STOP --kill-whom=main vmmfd-keeper");
    let driver = driver();
    let client = client();
    let begun = Instant::now();
    client.put(&Put::new("stopped-keeper").part(PutPart::of("all", &filled(&driver, 1)).unwrap())).unwrap();
    thread::sleep(Duration::from_secs(8));
    client.put(&Put::new("after-it").part(PutPart::of("all", &filled(&driver, 1)).unwrap())).unwrap();
    println!("a stopped keeper: a put took {:.1} s at most", begun.elapsed().as_secs_f64() - 8.0);
    for writer in 0..WRITERS {
        let acknowledged = load.acknowledged[writer].load(Ordering::Acquire);
        match read(&client, &driver, &format!("load/{writer}")) {
            Ok(number) if number >= acknowledged => {}
            other => load.fail(format!("load/{writer}: {other:?}, and {acknowledged} was acknowledged")),
        }
    }
    let output =
        run("systemctl stop vmmfd vmmfd-keeper; journalctl -u vmmfd-keeper -u vmmfd --no-pager -o cat | tail -4");
    println!("the last lines of the journal:\n{}", say(&output).trim_end());
}

fn main() -> ExitCode {
    let (kills, restarts) = (number("VMMFD_TEST_KILLS", 50), number("VMMFD_TEST_RESTARTS", 20));
    println!("a put: {} us (the median of 3000)", put_us());
    if env::var_os("VMMFD_TEST_FIGURES").is_some() {
        let begun = Instant::now();
        put_many(1);
        println!("a put of {SEGMENTS} segments: {:.1?}", begun.elapsed());
        println!("a put beside these: {} us (the median of 3000)", put_us());
        return ExitCode::SUCCESS;
    }
    let load = Load::default();
    thread::scope(|scope| {
        // Also a panic ends the load.
        let _ends = Ends(&load.ends);
        for writer in 0..WRITERS {
            let load = &load;
            scope.spawn(move || write(load, writer));
            scope.spawn(move || get(load, writer));
        }
        load.settle("the start");
        println!("units that are not enabled:");
        events(&load, kills, restarts);
        many(&load);
        run("systemctl enable vmmfd vmmfd-keeper");
        println!("units that are enabled:");
        repeat(&load, "SIGKILL of both in turn", restarts, |round| {
            format!("systemctl kill -s KILL --kill-whom=main {}", ["vmmfd", "vmmfd-keeper"][round % 2])
        });
        repeat(&load, "stop and start of the server", restarts, |_| {
            "systemctl stop vmmfd && systemctl start vmmfd".to_owned()
        });
    });
    faults(&load);
    let failures = load.failures.into_inner().unwrap();
    let puts: u64 = load.acknowledged.iter().map(|of| of.load(Ordering::Acquire)).sum();
    println!("{puts} puts were acknowledged, {} gets answered, {} failures", load.gets.into_inner(), failures.len());
    ExitCode::from(u8::from(!failures.is_empty()))
}
