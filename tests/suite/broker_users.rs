//! A broker shared by several users: modes, groups, quotas, admission. Changing the user needs root.
//!
//! One file of more than 500 lines: all tests use its server and its users.

use std::{
    fs,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::Path,
    sync::Arc,
    thread,
    time::Duration,
};

use vmmfd::{
    Error,
    broker::{ClaimOf, Client, Condition, Found, Get, Put, PutPart, Quota, RecallOf},
    driver::Backend,
    error::{ErrorCode, PeerError, RefusalCode},
    memory::{Chunk, Description},
    session::Config,
    wire::broker::{self, Message},
};

use crate::{
    broker::{filled, refused, until},
    broker_process::{self, Process, Raw, Setup, become_user},
    support::material::{Material, memfd, restore},
    support::{Subject, in_fork},
};

const SERVER: u32 = 34560;
const MAKER: u32 = 34561;
const OTHER: u32 = 34562;
/// A group of both users; it is supplementary for `OTHER` in some checks.
const TEAM: u32 = 34570;

const MIB: u64 = 1 << 20;

/// Runs `body` as another user, in a fork of this process.
#[track_caller]
fn as_user(uid: u32, gid: u32, groups: &[u32], body: impl FnOnce()) {
    in_fork(|| {
        become_user(uid, gid, groups);
        body();
        true
    });
}

fn try_connect(path: &Path) -> vmmfd::Result<Client> {
    broker_process::connect(path, SERVER)
}

fn connect(path: &Path) -> Client {
    try_connect(path).unwrap()
}

/// Memory that a fork can put without calling the driver.
struct Piece(Description, Arc<Chunk>);

impl Piece {
    fn new(subject: &Subject, size: u64) -> Self {
        let shared = filled(&subject.driver, size, None, 1);
        let (_, mut chunks) = shared.chunks(0..size).unwrap().unwrap();
        Self(shared.describe().unwrap(), chunks.remove(0))
    }

    fn part(&self) -> PutPart<'_> {
        let segment = (self.1.size(), self.1.as_fd());
        PutPart::of_segments("all", Backend::Host, self.0.clone(), [segment]).unwrap()
    }
}

fn put(client: &Client, name: &str, memory: &Piece, condition: Condition) -> vmmfd::Result<u64> {
    let put = Put::new(name).condition(condition).part(memory.part());
    client.put(&put).map(|published| published.version)
}

fn allowing(subject: &Subject, uids: &[u32]) -> Setup {
    Setup { user: SERVER, allow_uids: uids.to_vec(), ..Setup::of(subject) }
}

#[track_caller]
fn assert_code<T: std::fmt::Debug>(result: vmmfd::Result<T>, code: Option<RefusalCode>, what: &str) {
    match code {
        Some(code) => assert_eq!(refused(result).0, code, "{what}"),
        None => drop(result.unwrap_or_else(|error| panic!("{what}: {error}"))),
    }
}

mod root {
    use super::*;

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn only_owner_recalls() {
        let subject = Subject::host();
        let server = Process::start(allowing(&subject, &[MAKER, OTHER]));
        let (path, memory) = (server.path.clone(), Piece::new(&subject, MIB));
        as_user(MAKER, TEAM, &[], || {
            connect(&path).put(&Put::new("a").mode(0o666).part(memory.part())).unwrap();
        });
        let root = connect(&path);
        let held = root.get(&Get::new("a")).unwrap();
        let recalls = |uid, code: Option<RefusalCode>, marked: bool| {
            as_user(uid, uid, &[], || {
                assert_code(connect(&path).recall("a", RecallOf::Current, Duration::ZERO), code, "a recall");
            });
            assert_eq!(root.who("a").unwrap().leases[0].recalled, marked, "after uid {uid}");
        };
        recalls(OTHER, Some(RefusalCode::Denied), false);
        recalls(MAKER, None, true);
        assert!(held.is_recalled().unwrap());
    }

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn modes_decide_read_and_replace() {
        let subject = Subject::host();
        let server = Process::start(allowing(&subject, &[MAKER, OTHER]));
        let path = server.path.clone();
        let memory = Piece::new(&subject, MIB);
        let modes = [0o600, 0o640, 0o644, 0o660, 0o666, 0o606, 0o066, 0o000, 0o622];
        as_user(MAKER, TEAM, &[], || {
            let client = connect(&path);
            for mode in modes {
                let put = Put::new(format!("m{mode:03o}")).mode(mode).part(memory.part());
                client.put(&put).unwrap();
            }
            // Without a mode, only the maker may access the object.
            put(&client, "none", &memory, Condition::New).unwrap();
            assert_eq!(client.stat("none", None).unwrap().version.summary.mode, 0o600);
        });
        let denied = Some(RefusalCode::Denied);
        let sees = |class: u32, uid: u32, gid: u32, groups: &[u32]| {
            as_user(uid, gid, groups, || {
                let client = connect(&path);
                let mut readable = Vec::new();
                for mode in modes {
                    let name = format!("m{mode:03o}");
                    let what = format!("mode {mode:03o} as {uid}, {gid}, {groups:?}");
                    let bits = u32::from(mode) >> class;
                    let (reads, writes) = (bits & 4 != 0, bits & 2 != 0);
                    let may_read = if reads { None } else { denied };
                    assert_code(client.get(&Get::new(&name)), may_read, &what);
                    assert_code(client.stat(&name, None), may_read, &what);
                    let may_write = if writes { None } else { denied };
                    assert_code(put(&client, &name, &memory, Condition::Any), may_write, &what);
                    // Only users with read access learn that the name exists, except through a put with `Condition::New`.
                    assert_code(put(&client, &name, &memory, Condition::New), Some(RefusalCode::Exists), &what);
                    if reads {
                        readable.push(name.clone());
                        let version = client.stat(&name, None).unwrap().version;
                        // A replacement keeps owner, group and mode.
                        let owner = version.summary.owner;
                        assert_eq!((owner.uid, owner.gid, version.summary.mode), (MAKER, TEAM, mode), "{what}");
                        assert_eq!(version.parts[0].maker.uid, if writes { uid } else { MAKER }, "{what}");
                    }
                    if uid != MAKER {
                        assert_code(client.delete(&name), denied, &what);
                    }
                }
                let listed: Vec<String> = client.list("m").unwrap().into_iter().map(|of| of.name).collect();
                readable.sort();
                assert_eq!(listed, readable, "as {uid}, {gid}, {groups:?}");
            });
        };
        // The class of other users; the group, as main and as supplementary group (among many); the owner.
        sees(0, OTHER, OTHER, &[]);
        let many: Vec<u32> = (40_000..40_300).chain([TEAM]).collect();
        for (gid, groups) in [(TEAM, &[][..]), (OTHER, &[TEAM]), (OTHER, &many)] {
            // In a replaced version the maker of the part is the replacing user.
            sees(3, OTHER, gid, groups);
        }
        sees(6, MAKER, MAKER, &[]);
        // The server's user and root may do everything, and owners may delete objects that they can't read.
        for uid in [SERVER, 0] {
            as_user(uid, uid, &[], || {
                let client = connect(&path);
                assert_eq!(client.list("m").unwrap().len(), modes.len());
                client.get(&Get::new("m000")).unwrap();
                put(&client, "m000", &memory, Condition::Any).unwrap();
                assert_eq!(client.stat("m000", None).unwrap().version.summary.owner.uid, MAKER);
                put(&client, "mine", &memory, Condition::New).unwrap();
                client.delete("mine").unwrap();
            });
        }
        as_user(SERVER, SERVER, &[], || connect(&path).delete("m666").unwrap());
        as_user(MAKER, MAKER, &[], || connect(&path).delete("m000").unwrap());
        // A replacement that requests another mode.
        as_user(MAKER, TEAM, &[], || {
            let put = Put::new("m600").condition(Condition::Any).mode(0o666).part(memory.part());
            let (code, message) = refused(connect(&path).put(&put));
            assert_eq!((code, message.contains("0600") && message.contains("0666")), (RefusalCode::Invalid, true));
        });
    }

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn leases_are_shown_to_holders_and_readers() {
        let subject = Subject::host();
        let server = Process::start(allowing(&subject, &[MAKER, OTHER]));
        let path = server.path.clone();
        let memory = Piece::new(&subject, MIB);
        as_user(MAKER, MAKER, &[], || {
            let client = connect(&path);
            for (name, mode) in [("secret", 0o600), ("open", 0o644)] {
                client.put(&Put::new(name).mode(mode).part(memory.part())).unwrap();
            }
            let _held = [client.get(&Get::new("secret")).unwrap(), client.get(&Get::new("open")).unwrap()];
            assert_eq!(client.who("").unwrap().leases.len(), 2);
            let held = client.who("").unwrap();
            assert!(
                held.leases.iter().all(|lease| lease.uid == MAKER && lease.pid.cast_unsigned() == std::process::id())
            );
            assert_eq!((held.totals.len(), held.totals[0].uid, held.totals[0].leases), (1, MAKER, 2));
        });
        let root = server.client();
        until(|| root.who("").unwrap().leases.is_empty());
        let _held = [root.get(&Get::new("secret")).unwrap(), root.get(&Get::new("open")).unwrap()];
        as_user(OTHER, OTHER, &[], || {
            let held = connect(&path).who("").unwrap();
            let names: Vec<&str> = held.leases.iter().map(|lease| lease.name.as_str()).collect();
            assert_eq!(names, ["open"]);
            assert_eq!(held.totals.iter().map(|of| of.uid).collect::<Vec<_>>(), [OTHER]);
        });
        // Privileged users see the totals of all users.
        let totals: Vec<(u32, u64)> = root.who("").unwrap().totals.iter().map(|of| (of.uid, of.objects)).collect();
        assert!(totals.contains(&(MAKER, 2)), "{totals:?}");
    }

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn quotas_are_each_user_s_own() {
        let subject = Subject::host();
        let quota = [Some(5 * MIB), Some(2), Some(1), Some(3)];
        let server = Process::start(Setup { quota, ..allowing(&subject, &[MAKER, OTHER]) });
        let path = server.path.clone();
        let memory = Piece::new(&subject, 2 * MIB);
        for uid in [MAKER, OTHER] {
            as_user(uid, uid, &[], || {
                let client = connect(&path);
                let name = |at: u32| format!("{uid}/{at}");
                put(&client, &name(0), &memory, Condition::New).unwrap();
                put(&client, &name(1), &memory, Condition::New).unwrap();
                let (code, message) = refused(put(&client, &name(2), &memory, Condition::New));
                assert_eq!(code, RefusalCode::Quota);
                assert!(
                    message.contains(&format!("uid {uid} has 2 objects and asks for 1 more, but its quota is 2")),
                    "{message}"
                );
                let claimed = refused(client.get_or_claim(&Get::new(name(2)), &ClaimOf::whole()));
                assert_eq!(claimed.0, RefusalCode::Quota, "{}", claimed.1);
                // A refused put leaves no file behind.
                let held = client.who("").unwrap();
                assert_eq!(held.totals[0].devices[0].bytes, 4 * MIB);
            });
        }
        // A version counts against the quota of the user who put it, even if the name belongs to another user.
        let root = server.client();
        let totals: Vec<(u32, u64)> = root.who("").unwrap().totals.iter().map(|of| (of.uid, of.objects)).collect();
        assert!(totals.contains(&(MAKER, 2)) && totals.contains(&(OTHER, 2)), "{totals:?}");
        // Without options, each user has the default quota.
        let path = Process::start(allowing(&subject, &[MAKER]));
        as_user(MAKER, MAKER, &[], || assert_eq!(connect(&path.path).metrics().unwrap().quota, Some(Quota::user())));
    }

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn only_allowed_users_and_groups_connect() {
        let subject = Subject::host();
        let refused_as = |path: &Path, uid: u32, gid: u32, groups: &[u32]| {
            as_user(uid, gid, groups, || match try_connect(path) {
                Err(Error::Peer(PeerError::Reported { code: ErrorCode::Refused, message })) => {
                    assert!(
                        message
                            .contains(&format!("uid {uid} may not connect: start the broker with --allow-uid {uid}")),
                        "{message}"
                    );
                }
                other => panic!("{other:?}"),
            });
        };
        let allowed_as =
            |path: &Path, uid: u32, gid: u32, groups: &[u32]| as_user(uid, gid, groups, || drop(connect(path)));
        let by_uid = Process::start(allowing(&subject, &[MAKER]));
        assert_eq!(fs::metadata(&by_uid.path).unwrap().mode() & 0o777, 0o666);
        allowed_as(&by_uid.path, MAKER, MAKER, &[]);
        refused_as(&by_uid.path, OTHER, MAKER, &[MAKER]);
        let by_gid = Process::start(Setup { allow_gids: vec![TEAM], ..allowing(&subject, &[]) });
        assert_eq!(fs::metadata(&by_gid.path).unwrap().mode() & 0o777, 0o666);
        allowed_as(&by_gid.path, OTHER, TEAM, &[]);
        allowed_as(&by_gid.path, OTHER, OTHER, &[1, TEAM]);
        refused_as(&by_gid.path, OTHER, OTHER, &[1]);
        // The refusal contains the group's name if it has one.
        let by_name = Process::start(Setup { allow_gids: vec![0, TEAM], ..allowing(&subject, &[]) });
        as_user(OTHER, OTHER, &[], || {
            let message = try_connect(&by_name.path).unwrap_err().in_full();
            assert!(message.contains(&format!("or add this user to the group root or {TEAM}")), "{message}");
        });
        // The server's user and root are always admitted. If no other user is allowed, the socket file denies all others.
        let alone = Process::start(allowing(&subject, &[]));
        assert_eq!(fs::metadata(&alone.path).unwrap().mode() & 0o777, 0o600);
        for process in [&by_uid, &by_gid, &alone] {
            allowed_as(&process.path, SERVER, SERVER, &[]);
            allowed_as(&process.path, 0, 0, &[]);
        }
        let path = alone.path.clone();
        as_user(OTHER, OTHER, &[], || {
            // The client retries until its timeout: a new broker may replace the socket.
            let config = Config::default().timeout(Duration::from_millis(100));
            let error = Client::connect(&path, &config).unwrap_err();
            assert!(matches!(error, Error::Socket(_)), "{error:?}");
        });
    }

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn unmapped_user_owns_nothing() {
        let subject = Subject::host();
        let overflow: u32 = fs::read_to_string("/proc/sys/kernel/overflowuid").unwrap().trim().parse().unwrap();
        // The server's namespace maps only root: all other users look alike.
        let server = Process::start(Setup { allow_uids: vec![overflow], alone: true, ..Setup::of(&subject) });
        let path = server.path.clone();
        let memory = Piece::new(&subject, MIB);
        let root = server.client();
        for (name, mode) in [("open", 0o644), ("writable", 0o666), ("secret", 0o600)] {
            root.put(&Put::new(name).mode(mode).part(memory.part())).unwrap();
        }
        for uid in [MAKER, OTHER] {
            as_user(uid, uid, &[], || {
                let client = connect(&path);
                let (code, message) = refused(put(&client, "mine", &memory, Condition::New));
                assert_eq!((code, message.contains("can't own objects")), (RefusalCode::Denied, true), "{message}");
                assert_code(put(&client, "writable", &memory, Condition::Any), Some(RefusalCode::Denied), "replace");
                assert_code(client.delete("open"), Some(RefusalCode::Denied), "delete");
                assert_code(client.get(&Get::new("secret")), Some(RefusalCode::Denied), "get");
                assert_eq!(client.list("").unwrap().len(), 2);
                client.get(&Get::new("open")).unwrap();
            });
        }
        assert_eq!(root.list("").unwrap().len(), 3);
    }

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn only_owner_and_server_user_restore_a_version() {
        let subject = Subject::host();
        let server = Process::start(allowing(&subject, &[MAKER, OTHER]));
        let path = server.path.clone();
        let shared = filled(&subject.driver, MIB, None, 1);
        let memory = Material::of(&shared);
        let offer = |name: &str, uid: u32, token: u8| {
            // The id of this version: an id of another version is refused.
            let restore = restore(name.as_bytes()[0], uid, TEAM, token);
            let put = broker::PutHeader { restore: Some(restore), mode: Some(0o644), ..memory.put(name) };
            let answer = Raw::greeted(&path).unwrap().ask(&Message::Put(Box::new(put)), &memory.fds()).unwrap();
            match answer.unwrap().0 {
                Message::Published(published) => Ok(published.version),
                Message::Refused(refusal) => Err(refusal.code),
                other => panic!("{other:?}"),
            }
        };
        as_user(OTHER, OTHER, &[], || {
            // A user can't restore an object that belongs to another user, but can restore its own.
            assert_eq!(offer("a", MAKER, 1), Err(RefusalCode::Denied));
            assert_eq!(offer("b", OTHER, 1), Ok(3));
        });
        as_user(MAKER, TEAM, &[], || assert_eq!(offer("a", MAKER, 2), Ok(3)));
        as_user(OTHER, OTHER, &[], || {
            // The version exists: a user who could have offered it gets `Exists`, any other user gets `Denied`.
            assert_eq!(offer("a", OTHER, 3), Err(RefusalCode::Exists));
            assert_eq!(offer("a", MAKER, 3), Err(RefusalCode::Denied));
        });
        as_user(SERVER, SERVER, &[], || {
            assert_eq!(offer("a", MAKER, 4), Ok(3));
            let owner = connect(&path).stat("a", None).unwrap().version.summary.owner;
            assert_eq!((owner.uid, owner.gid), (MAKER, TEAM));
        });
    }

    /// A put of several tables, each with its own memory.
    fn put_of_tables(memory: &Material, name: &str, tables: &[OwnedFd], length: u64) -> broker::PutHeader {
        let mut put = memory.put(name);
        let one = broker::PutPartHeader { arrays: Some(broker::Table::Length(length)), ..put.parts[0].clone() };
        put.parts =
            (0..tables.len()).map(|at| broker::PutPartHeader { name: format!("p{at}"), ..one.clone() }).collect();
        for part in &mut put.parts {
            (part.memory.size, part.memory.mapped_size, part.memory.segments) = (2 * MIB, 2 * MIB, 1);
        }
        put
    }

    /// A table that takes long to parse: JSON in a form that this library does not write.
    fn slow_table(arrays: usize) -> String {
        let entry = |at| format!(r#"{{ "name": "a{at}", "array": {{ "shape": [ 1 ], "dtype": "uint8" }} }}"#);
        format!("[ {} ]", (0..arrays).map(entry).collect::<Vec<_>>().join(", "))
    }

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn users_take_turns_at_tables() {
        let subject = Subject::host();
        let server = Process::start(allowing(&subject, &[MAKER, OTHER]));
        let path = server.path.clone();
        let memory = Material::of(&filled(&subject.driver, 2 * MIB, None, 1)).repeated(60);
        let text = slow_table(20_000);
        let tables: Vec<OwnedFd> = (0..60).map(|_| memfd(&text)).collect();
        let small = Material::of(&filled(&subject.driver, 2 * MIB, None, 1));
        let short = memfd(&slow_table(200));
        let hostile = Raw::greeted(&path).unwrap();
        let put = put_of_tables(&memory, "hostile", &tables, text.len() as u64);
        let fds: Vec<_> = tables.iter().map(AsFd::as_fd).chain(memory.fds()).collect();
        hostile.send(&Message::Put(Box::new(put)), &fds).unwrap();
        as_user(OTHER, OTHER, &[], || {
            let raw = Raw::greeted(&path).unwrap();
            let put = put_of_tables(&small, "other", std::slice::from_ref(&short), slow_table(200).len() as u64);
            let fds = [short.as_fd(), small.fds()[0]];
            let answer = raw.ask(&Message::Put(Box::new(put)), &fds).unwrap();
            assert!(matches!(answer, Some((Message::Published(_), _))), "{answer:?}");
        });
        // The larger put, which started earlier, is still in progress.
        hostile.0.set_nonblocking(true).unwrap();
        assert_eq!(hostile.receive().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    }

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn claims_need_the_right_to_put() {
        let subject = Subject::host();
        let overflow: u32 = fs::read_to_string("/proc/sys/kernel/overflowuid").unwrap().trim().parse().unwrap();
        let server = Process::start(allowing(&subject, &[MAKER, OTHER, overflow]));
        let path = server.path.clone();
        let memory = Piece::new(&subject, MIB);
        as_user(MAKER, MAKER, &[], || {
            let client = connect(&path);
            for (name, mode) in [("secret", 0o600), ("readable", 0o644), ("writable", 0o666)] {
                client.put(&Put::new(name).mode(mode).part(memory.part())).unwrap();
            }
        });
        let claims = |uid: u32, get: &Get, granted: bool| {
            as_user(uid, uid, &[], || match connect(&path).get_or_claim(get, &ClaimOf::whole()) {
                Ok(Found::Claim(_)) => assert!(granted, "{get:?} as {uid} was granted"),
                Err(Error::Broker(error)) => assert_eq!((error.code, granted), (RefusalCode::Denied, false), "{get:?}"),
                other => panic!("{other:?}"),
            });
        };
        // Only readers learn whether a version exists.
        for get in [Get::new("secret").version(99), Get::new("secret").newer_than(0), Get::new("secret").newer_than(1)]
        {
            as_user(OTHER, OTHER, &[], || assert_code(connect(&path).get(&get), Some(RefusalCode::Denied), "get"));
            claims(OTHER, &get, false);
        }
        claims(OTHER, &Get::new("readable").newer_than(1), false);
        claims(OTHER, &Get::new("writable").newer_than(1), true);
        claims(OTHER, &Get::new("free"), true);
        claims(overflow, &Get::new("other"), false);
    }

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn claims_are_shown_to_waiting_users() {
        let subject = Subject::host();
        let server = Process::start(allowing(&subject, &[OTHER]));
        let path = server.path.clone();
        let claimer = connect(&path);
        let claimed = claimer.get_or_claim(&Get::new("secret/plan"), &ClaimOf::whole()).unwrap();
        let holders = |client: &Client, prefix: &str| -> Vec<i32> {
            client.who(prefix).unwrap().claims.iter().map(|claim| claim.pid).collect()
        };
        let own = std::process::id().cast_signed();
        assert_eq!(holders(&claimer, ""), [own], "a superuser sees all");
        as_user(OTHER, OTHER, &[], || {
            let client = connect(&path);
            for prefix in ["", "secret", "secret/pla", "secret/plan/a"] {
                assert_eq!(holders(&client, prefix), [0; 0], "{prefix}");
            }
            assert!(client.metrics().unwrap().claims.unwrap().is_empty());
            assert_eq!(holders(&client, "secret/plan"), [own], "a get names the holder too");
            let waiting = connect(&path);
            let stop = waiting.clone();
            let get = Get::new("secret/plan").wait(Duration::from_secs(600));
            let waited = thread::spawn(move || waiting.get(&get));
            until(|| holders(&client, "") == [own]);
            assert_eq!(client.metrics().unwrap().claims.unwrap().len(), 1);
            stop.stop().unwrap();
            assert_code(waited.join().unwrap(), Some(RefusalCode::Stopped), "the wait");
        });
        drop(claimed);
    }

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn lost_names_wait_for_their_owners() {
        let subject = Subject::host();
        let server = Process::start(Setup { after_loss: true, ..allowing(&subject, &[MAKER, OTHER]) });
        let path = server.path.clone();
        let memory = Material::of(&filled(&subject.driver, MIB, None, 1));
        let squatter = Raw::greeted(&path).unwrap();
        squatter.send(&Message::Put(Box::new(memory.put("models/x"))), &memory.fds()).unwrap();
        as_user(MAKER, TEAM, &[], || {
            let restore = restore(1, MAKER, TEAM, 1);
            let put = broker::PutHeader { restore: Some(restore), ..memory.put("models/x") };
            let answer = Raw::greeted(&path).unwrap().ask(&Message::Put(Box::new(put)), &memory.fds()).unwrap();
            assert!(matches!(answer, Some((Message::Published(_), _))), "{answer:?}");
        });
        match squatter.receive().unwrap().unwrap().0 {
            Message::Refused(refusal) => assert_eq!(refusal.code, RefusalCode::Exists),
            other => panic!("{other:?}"),
        }
        let root = server.client();
        assert_eq!(root.stat("models/x", None).unwrap().version.summary.owner.uid, MAKER);
        // After the grace period a put does not wait.
        as_user(OTHER, OTHER, &[], || {
            let answer = Raw::greeted(&path).unwrap().ask(&Message::Put(Box::new(memory.put("y"))), &memory.fds());
            assert!(matches!(answer, Ok(Some((Message::Published(_), _)))), "{answer:?}");
        });
    }

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn false_devices_hide_no_other_user() {
        let subject = Subject::host();
        let server = Process::start(allowing(&subject, &[MAKER, OTHER]));
        let path = server.path.clone();
        let memory = Material::of(&filled(&subject.driver, 2 * MIB, None, 1));
        let put_many = |raw: &Raw, name: &str, from: u64| {
            let parts = memory.put("").parts;
            let part = |at: u64| {
                let mut part = broker::PutPartHeader { name: format!("p{at}"), ..parts[0].clone() };
                part.memory.device.uuid = format!("00000000-0000-0000-0000-{:012x}", from + at).parse().unwrap();
                part.memory.device.name = "x".repeat(255);
                part
            };
            let put =
                broker::PutHeader { parts: (0..50).map(part).collect(), sizes: vec![2 * MIB; 50], ..memory.put(name) };
            let fds = vec![memory.fds()[0]; 50];
            match raw.ask(&Message::Put(Box::new(put)), &fds).unwrap().unwrap().0 {
                Message::Published(_) => Ok(()),
                Message::Refused(refusal) => Err(refusal.code),
                other => panic!("{other:?}"),
            }
        };
        as_user(MAKER, MAKER, &[], || {
            let raw = Raw::greeted(&path).unwrap();
            let made: Vec<_> = (0..8).map(|at| put_many(&raw, &format!("made-up/{at}"), 50 * at)).collect();
            assert_eq!((made[0], made[7]), (Ok(()), Err(RefusalCode::Quota)), "{made:?}");
        });
        let honest = Piece::new(&subject, 2 * MIB);
        as_user(OTHER, OTHER, &[], || {
            put(&connect(&path), "honest", &honest, Condition::New).unwrap();
        });
        let root = server.client();
        for totals in [root.who("").unwrap().totals, root.metrics().unwrap().totals] {
            let other = totals.iter().find(|total| total.uid == OTHER).expect("the other user is listed");
            assert_eq!((other.objects, other.devices.len(), other.devices[0].bytes), (1, 1, 2 * MIB));
        }
    }
}
