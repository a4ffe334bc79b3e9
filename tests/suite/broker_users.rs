//! A broker shared by several users, as the kernel reports them. What each may do is tested without processes, in the unit tests of the
//! verbs.

use vmmfd::broker::{Quota, RecallOf};

use crate::support::{material::Material, prelude::*, served::connect};

const SERVER: u32 = 34560;
const MAKER: u32 = 34561;
const OTHER: u32 = 34562;
/// A group of both users.
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

fn put(memory: &Material, client: &Client, name: &str, mode: u16) -> vmmfd::Result<u64> {
    client.put(&Put::new(name).mode(mode).part(memory.part())).map(|published| published.version)
}

mod root {
    use super::*;

    fn allowing(uids: &[u32], options: &[&str]) -> Served {
        let uids: Vec<_> = uids.iter().flat_map(|uid| ["--allow-uid".to_owned(), uid.to_string()]).collect();
        let options: Vec<_> = uids.iter().map(String::as_str).chain(options.iter().copied()).collect();
        Served::as_user(SERVER, "", &options)
    }

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn users_are_those_of_the_kernel() {
        let served = allowing(&[MAKER, OTHER], &["--quota", "objects=2,connections=2"]);
        let (path, memory) = (served.path.clone(), Material::of(&filled(&Subject::host().driver, 2 * MIB, None, 1)));
        as_user(MAKER, TEAM, &[], || {
            let client = connect(&path).unwrap();
            put(&memory, &client, "group", 0o640).unwrap();
            put(&memory, &client, "secret", 0o600).unwrap();
            assert_eq!(refused(put(&memory, &client, "third", 0o600)).0, RefusalCode::Quota);
            let more = [(); 2].map(|()| connect(&path));
            assert!(more[0].is_ok() && matches!(more[1], Err(Error::Peer(PeerError::Reported { .. }))), "{more:?}");
        });
        let many: Vec<u32> = (40_000..40_300).chain([TEAM]).collect();
        for (groups, reads) in [(&many[..], true), (&many[..300], false)] {
            as_user(OTHER, OTHER, groups, || {
                let client = connect(&path).unwrap();
                assert_eq!(client.get(&Get::new("group")).is_ok(), reads);
                assert_eq!(refused(client.get(&Get::new("secret"))).0, RefusalCode::Denied);
                assert_eq!(refused(client.delete("group")).0, RefusalCode::Denied);
            });
        }
        // Only the owner and superusers may recall.
        let root = connect(&path).unwrap();
        let held = root.get(&Get::new("group")).unwrap();
        for (uid, allowed) in [(OTHER, false), (MAKER, true)] {
            as_user(uid, uid, &[TEAM], || {
                let recall = connect(&path).unwrap().recall("group", RecallOf::Current, Duration::ZERO);
                assert_eq!(recall.is_ok(), allowed);
            });
            assert_eq!(root.who("group").unwrap().leases[0].recalled, allowed, "after uid {uid}");
        }
        assert!(held.is_recalled().unwrap());
        as_user(SERVER, SERVER, &[], || connect(&path).unwrap().delete("secret").unwrap());
        // Without options, each user has the default quota.
        let served = allowing(&[MAKER], &[]);
        as_user(MAKER, MAKER, &[], || {
            assert_eq!(connect(&served.path).unwrap().metrics().unwrap().quota, Some(Quota::user()));
        });
    }

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn only_allowed_users_and_groups_connect() {
        let refused_as = |served: &Served, uid: u32, gid: u32, groups: &[u32], words: &str| {
            as_user(uid, gid, groups, || match connect(&served.path) {
                Err(Error::Peer(PeerError::Reported { code: ErrorCode::Refused, message })) => {
                    assert!(message.contains(words), "{message}");
                }
                other => panic!("{other:?}"),
            });
        };
        let allowed_as = |served: &Served, uid: u32, gid: u32, groups: &[u32]| {
            as_user(uid, gid, groups, || connect(&served.path).unwrap().list("").map(drop).unwrap());
        };
        let by_uid = allowing(&[MAKER], &[]);
        allowed_as(&by_uid, MAKER, MAKER, &[]);
        let words = format!("uid {OTHER} may not connect: start the broker with --allow-uid {OTHER}");
        refused_as(&by_uid, OTHER, MAKER, &[MAKER], &words);
        let by_gid = allowing(&[], &["--allow-gid", "0", "--allow-gid", &TEAM.to_string()]);
        allowed_as(&by_gid, OTHER, TEAM, &[]);
        allowed_as(&by_gid, OTHER, OTHER, &[1, TEAM]);
        // With one group, the socket's file admits only this group.
        let by_one = Served::alone(&["--allow-gid", &TEAM.to_string()]);
        let socket = fs::metadata(&by_one.path).unwrap();
        assert_eq!((socket.mode() & 0o777, socket.gid()), (0o660, TEAM));
        allowed_as(&by_one, OTHER, TEAM, &[]);
        // The refusal contains the group's name if it has one.
        refused_as(&by_gid, OTHER, OTHER, &[1], &format!("or add this user to the group root or {TEAM}"));
        // The server's user and root are always admitted. If no other user is allowed, the socket file denies all others.
        let alone = allowing(&[], &[]);
        for served in [&by_uid, &by_gid, &alone] {
            allowed_as(served, SERVER, SERVER, &[]);
            allowed_as(served, 0, 0, &[]);
        }
        as_user(OTHER, OTHER, &[], || {
            // The client retries until its timeout: a new broker may replace the socket.
            let config = Config::default().timeout(Duration::from_millis(100));
            let error = Client::connect(&alone.path, &config).unwrap_err();
            assert!(matches!(error, Error::Socket(_)), "{error:?}");
        });
    }
}
