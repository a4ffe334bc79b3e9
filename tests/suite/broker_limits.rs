//! A hostile, slow or busy client: its share of the server is bounded, and others are served.

use nix::sys::{
    ptrace::{self, Options},
    wait::{WaitPidFlag, waitpid},
};
use vmmfd::wire::{
    MAX_FDS,
    broker::{self, Attached, Delete, GetHeader, Lifetime, List, Measure, Message, Table},
};

use crate::support::{
    cpu_turn,
    material::{Material, get, get_message},
    pages::{PAGE, Template, page},
    prelude::*,
    served::{processor_time, status, stored},
};

const MIB: u64 = 1 << 20;

/// The connections of a hostile user.
const HOSTILE: usize = 20;

/// The limit on a server's resident memory under attack, in KiB.
const MOST: u64 = 64 << 10;

/// Puts many versions of one page.
struct Maker {
    raw: Raw,
    put: broker::PutHeader,
    page: OwnedFd,
}

impl Maker {
    fn new(served: &Served) -> Self {
        let put = broker::PutHeader { replace: true, ..Template::new().put_of_pages("a", 1) };
        Self { raw: served.greeted().0, put, page: page(0) }
    }

    #[track_caller]
    fn publish(&mut self, name: &str) {
        name.clone_into(&mut self.put.name);
        self.raw.put(self.put.clone(), &[self.page.as_fd()]).unwrap();
    }
}

#[track_caller]
fn assert_bounded(served: &Served) {
    let most = status(served.pid(), "VmHWM");
    eprintln!("{most} KiB at most");
    assert!(most <= MOST, "{most} KiB");
}

/// The CPU time that the server spends on `work`.
fn cost(served: &Served, work: impl FnOnce()) -> u64 {
    let before = processor_time(served.pid());
    work();
    processor_time(served.pid()) - before
}

/// Puts an object whose segments all share one file.
fn put_segments(client: &Client, name: &str, segments: usize) {
    let material = Material::of(&filled(&Subject::host().driver, 2 * MIB, None, 1)).repeated(segments);
    client.put(&Put::new(name).mode(0o644).part(material.part())).unwrap();
}

mod memory {
    use super::*;

    #[test]
    fn unread_answers_are_bounded() {
        let served = Served::alone(&["--timeout", "60s"]);
        let mut maker = Maker::new(&served);
        (0..150).for_each(|number| maker.publish(&format!("{number:0>250}")));
        let connections: Vec<Raw> = (0..2 * HOSTILE).map(|_| served.greeted().0).collect();
        let list = Message::List(List::default());
        for raw in &connections {
            raw.0.set_nonblocking(true).unwrap();
            // Until the socket is full, or the pending answers reach the broker's limit.
            let asked = (0..60).take_while(|_| raw.send(&list, &[]).is_ok()).count();
            assert!(asked > 4, "{asked}");
        }
        // Once the server is idle, it has read every request that it accepts.
        until(|| cost(&served, || thread::sleep(Duration::from_millis(100))) < 1_000_000);
        assert!(matches!(served.greeted().0.answer(&list), Message::Objects(_)));
        assert_bounded(&served);
        // A blocked client is served once it reads.
        connections[0].0.set_nonblocking(false).unwrap();
        for _ in 0..10 {
            assert!(matches!(connections[0].receive().unwrap(), Some((Message::Objects(_), _))));
        }
    }

    #[test]
    fn requests_that_wait_are_bounded() {
        let served = Served::alone(&[]);
        let mut wait = get(&"a".repeat(250));
        wait.wait_ms = Some(600_000);
        // Each part takes ten times its length once parsed.
        wait.objects[0].parts = Some((0..900).map(|part| (part.to_string(), Vec::new())).collect());
        wait.objects.resize(64, get(&"b".repeat(250)).objects.remove(0));
        let connections: Vec<Raw> = (0..4 * HOSTILE).map(|_| served.greeted().0).collect();
        connections.iter().for_each(|raw| raw.send(&Message::Get(Box::new(wait.clone())), &[]).unwrap());
        let raw = served.greeted().0;
        raw.measured();
        assert_bounded(&served);
        // The request that was read last was refused, and its connection remains usable.
        until(|| connections.iter().any(|raw| raw.has_answer_within(0)));
        let last = connections.iter().find(|raw| raw.has_answer_within(0)).unwrap();
        let Some((Message::Refused(refusal), _)) = last.receive().unwrap() else { panic!("no refusal") };
        assert!(refusal.code == RefusalCode::Quota && refusal.message.contains("its quota is 16 MiB"), "{refusal:?}");
        assert!(matches!(last.answer(&Message::List(List::default())), Message::Objects(_)));
        // A short wait works again once the other connections are closed.
        drop(connections);
        raw.until_connections(1);
        let waits = Message::Get(Box::new(GetHeader { wait_ms: Some(1), ..get("absent") }));
        assert_eq!(raw.refusal(&waits).code, RefusalCode::Timeout);
    }

    #[test]
    fn objects_load_within_serving_memory() {
        let served = Served::start(Keeper::Own, &Subject::host());
        let mut maker = Maker::new(&served);
        maker.put.metadata = Some(Table::Inline(Attached::of(&json!({"note": "x".repeat(3800)})).unwrap()));
        maker.put.keep = Some(64);
        (0..66 * 20).for_each(|at| maker.publish(&(at % 20).to_string()));
        let served_in = status(served.pid(), "VmHWM");
        let (new, _) = served.kill_server();
        let loaded_in = status(new, "VmHWM");
        // The live versions alone have 5 MiB of metadata.
        assert!(loaded_in <= served_in + 2048, "{served_in} KiB while serving, {loaded_in} KiB while loading");
        assert_eq!(served.greeted().0.measured().versions, 20 * 65);
    }
}

/// While the thread that closes replaced memory is stopped, the event loop continues.
#[test]
fn puts_wait_for_closing_replaced_memory() {
    let served = Served::alone(&[]);
    let server = served.pid();
    let mut maker = Maker::new(&served);
    // The replaced version starts the thread.
    (0..2).for_each(|_| maker.publish("a"));
    let closer = || {
        let threads = fs::read_dir(format!("/proc/{server}/task")).unwrap().map(|task| task.unwrap().path());
        threads.filter(|path| fs::read_to_string(path.join("comm")).unwrap().starts_with("closer")).last()
    };
    // A thread names itself once it runs.
    until(|| closer().is_some());
    let closer = Pid::from_raw(closer().unwrap().file_name().unwrap().to_str().unwrap().parse().unwrap());
    ptrace::seize(closer, Options::empty()).unwrap();
    ptrace::interrupt(closer).unwrap();
    waitpid(closer, Some(WaitPidFlag::__WALL)).unwrap();
    let before = stored(server);
    let is_published = |maker: &Maker| matches!(maker.raw.receive().unwrap(), Some((Message::Published(_), _)));
    let mut answers = 0;
    while answers < 500 {
        maker.page = page(0);
        maker.raw.send(&Message::Put(Box::new(maker.put.clone())), &[maker.page.as_fd()]).unwrap();
        if !maker.raw.has_answer_within(500) {
            break;
        }
        assert!(is_published(&maker));
        answers += 1;
    }
    let held = stored(server) - before;
    ptrace::detach(closer, None).unwrap();
    assert!((256..360).contains(&answers) && held < 360, "{answers} answers, {held} more descriptors");
    assert!(is_published(&maker));
}

/// Quotas do not count memory without a name.
#[test]
fn puts_wait_for_released_memory() {
    const SEGMENTS: usize = 60;
    let served = Served::alone(&[]);
    let template = Template::new();
    let raws: Vec<Raw> = (0..10).map(|_| served.greeted().0).collect();
    let send_put = |raw: &Raw, name: &str, pages: usize| {
        let pages: Vec<_> = (0..pages).map(|_| page(1)).collect();
        let fds: Vec<_> = pages.iter().map(AsFd::as_fd).collect();
        raw.send(&Message::Put(Box::new(template.put_of_pages(name, pages.len()))), &fds).unwrap();
    };
    let assert_published = |raw: &Raw| assert!(matches!(raw.receive().unwrap(), Some((Message::Published(_), _))));
    for name in ["0", "1", "2"] {
        send_put(&raws[0], name, 2 * SEGMENTS);
        assert_published(&raws[0]);
    }
    let [deletes, measures] = [(); 2].map(|()| served.greeted().0);
    let before = measures.measured().descriptors.used;
    // The broker handles the deletes and the puts in one turn of its event loop.
    served.while_stopped(|| {
        for name in ["0", "1", "2"] {
            deletes.send(&Message::Delete(Delete { name: name.to_owned(), request: None }), &[]).unwrap();
        }
        raws.iter().enumerate().for_each(|(at, raw)| send_put(raw, &format!("small/{at}"), SEGMENTS));
        measures.send(&Message::Measure(Measure {}), &[]).unwrap();
    });
    let Some((Message::Measured(measured), _)) = measures.receive().unwrap() else { panic!() };
    let most = measured.descriptors.used;
    assert!(most <= before + 2 * SEGMENTS as u64, "{most} descriptors, and {before} before");
    raws.iter().for_each(assert_published);
}

/// Another client polls the leases of a closed connection while the server releases them, in a time that grows with their number. On a busy
/// machine the server may release all of them before the client runs again, so several attempts may be needed. The polls cost the server
/// time too, and their number depends on the machine: the time is compared for each lease and poll.
#[test]
fn others_are_served_while_leases_end() {
    let _turn = cpu_turn();
    let served = Served::alone(&[]);
    let (mut maker, other) = (Maker::new(&served), served.greeted().0);
    // Each lease holds another version of the same name.
    let mut end = |count: usize| {
        let reader = served.greeted().0;
        for _ in 0..count {
            maker.publish("a");
            reader.lease("a");
        }
        let mut seen = Vec::new();
        let cost = cost(&served, || {
            drop(reader);
            seen.extend(std::iter::repeat_with(|| other.measured().leases).take_while(|left| *left > 0));
        });
        (cost / (count + seen.len()) as u64, seen.iter().any(|left| *left < count as u64))
    };
    let few = end(100).0;
    assert!((0..10).any(|_| {
        let (many, is_seen) = end(1000);
        assert!(many < 4 * few, "{few} ns for each of 100 leases, {many} ns for each of 1000");
        is_seen
    }));
}

#[test]
fn unread_client_is_disconnected() {
    let served = Served::alone(&["--timeout", "300ms"]);
    let client = served.client();
    put_segments(&client, "a", 3);
    // One client does not read its lease, another one sends requests until its socket is full.
    let [leased, asking] = [(); 2].map(|()| served.greeted().0);
    leased.send(&get_message("a"), &[]).unwrap();
    asking.0.set_nonblocking(true).unwrap();
    let asked = (0..).take_while(|_| asking.send(&Message::List(List::default()), &[]).is_ok()).count();
    assert!(asked > 64);
    // A third one is served meanwhile.
    until(|| {
        client.get(&Get::new("a")).unwrap();
        served.log().contains("disconnecting a client that does not read its records")
    });
    for raw in [leased, asking] {
        raw.0.set_nonblocking(false).unwrap();
        raw.ending();
    }
    served.wait_for_others(&client, 0);
    assert!(client.who("").unwrap().leases.is_empty());
}

#[test]
fn descriptor_limit_refuses_early() {
    let subject = Subject::host();
    let served = Served::under("ulimit -n 600; exec", Keeper::None, &subject, &binary("vmmfd"), &["--timeout", "60s"]);
    let client = served.client();
    let keep = |name: &str| {
        // Each part has its own file.
        let memory: Vec<_> = (0..40).map(|_| filled(&subject.driver, PAGE, None, 1)).collect();
        let parts = memory.iter().zip(0..).map(|(memory, at)| PutPart::of(format!("p{at}"), memory).unwrap());
        client.put(&parts.fold(Put::new(name), Put::part))
    };
    keep("one").unwrap();
    // The put needs more descriptors than are left. Only its first record is sent.
    let material = Material::of(&filled(&subject.driver, 2 * MIB, None, 1)).repeated(600);
    let raw = served.greeted().0;
    let refusal = raw.put(material.put("many"), &material.fds()[..MAX_FDS]).unwrap_err();
    assert!(refusal.code == RefusalCode::Full && refusal.message.contains("descriptors"), "{refusal:?}");
    drop(raw);
    until(|| stored(served.pid()) == 40);
    // Then objects and connections until the broker is full.
    while keep(&format!("more/{}", stored(served.pid()))).is_ok() {}
    assert_eq!(refused(keep("more")).0, RefusalCode::Full);
    let mut connections = Vec::new();
    while let Ok(client) = Client::connect(&served.path, &Config::default()) {
        connections.push(client);
        assert!(connections.len() < 600);
    }
    // Existing connections still work, and each lease gets all its descriptors.
    for client in connections.iter().chain([&client]) {
        assert_eq!(client.get(&Get::new("one")).unwrap().parts().len(), 40);
    }
    drop(connections);
    client.delete("one").unwrap();
    served.wait_for_others(&client, 0);
    until(|| keep("again").is_ok());
}

/// The idle time begins again when the lease is dropped, and no other timer wakes the server.
#[test]
fn name_expires_without_traffic() {
    let served = Served::alone(&["--timeout", "600s"]);
    let mut maker = Maker::new(&served);
    maker.put.lifetime = Some(Lifetime::Idle { ms: 1500 });
    maker.publish("a");
    thread::sleep(Duration::from_millis(500));
    drop(served.client().get(&Get::new("a")).unwrap());
    until(|| stored(served.pid()) == 0);
}

mod root {
    use super::*;
    use crate::support::served::connect;

    const SERVER: u32 = 23456;
    const OTHER: u32 = 45671;

    fn as_other(body: impl FnOnce()) {
        in_fork(|| {
            become_user(OTHER, OTHER, &[]);
            body();
            true
        });
    }

    /// The kernel limits descriptors in flight for each user, here the server's. Privileged processes are exempt.
    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn idle_clients_leave_descriptors_for_others() {
        // With a long timeout, the idle connections stay. With a short one, the broker closes them, and their descriptors are still in flight.
        for timeout in ["600s", "300ms"] {
            let options = ["-v", "--timeout", timeout, "--allow-uid", &OTHER.to_string(), "--allow-uid", "0"];
            let served = Served::as_user(SERVER, "ulimit -n 2000;", &options);
            let client = served.client();
            put_segments(&client, "a", 200);
            // 6,000 descriptors, three times the kernel's limit.
            let unread: Vec<Raw> = (0..30).map(|_| served.greeted().0).collect();
            unread.iter().for_each(|raw| raw.send(&get_message("a"), &[]).unwrap());
            if timeout == "300ms" {
                until(|| served.log().matches("that does not read its records").count() == 2);
                served.wait_for_others(&client, 30);
            }
            let get_twenty = |client: &Client| {
                for _ in 0..20 {
                    let lease = client.get(&Get::new("a")).unwrap();
                    assert_eq!(lease.into_parts().remove(0).into_segments().unwrap().len(), 200);
                }
            };
            as_other(|| get_twenty(&connect(&served.path).unwrap()));
            // Another process of the same user gets a refusal. It is served once the idle connections are closed.
            let (code, message) = refused(client.get(&Get::new("a")));
            assert_eq!(code, RefusalCode::Full);
            assert!(
                message.starts_with("uid 0 has 400 unread descriptors and asks for 200 more, but its quota is 500: "),
                "{message}"
            );
            drop(unread);
            served.wait_for_others(&client, 0);
            get_twenty(&client);
        }
    }
}
