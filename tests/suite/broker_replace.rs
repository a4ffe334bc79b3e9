//! A name that is replaced constantly, and its readers.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
};

use vmmfd::broker::{Condition, Get};

use crate::{
    broker::until,
    broker_pages::{Template, number, pages_of, whole},
    broker_process::{Process, Setup},
    support::Subject,
};

const READERS: usize = 20;

/// The limit on memory descriptors: three for each version that a reader leases, for the current version and for two versions being closed,
/// plus the catalogue's.
const MOST: usize = (READERS + 8) * 3;

#[test]
fn readers_see_whole_versions_during_replaces() {
    let _turn = crate::support::cpu_turn();
    let replacements = number("VMMFD_TEST_REPLACEMENTS", 1000);
    let subject = Subject::host();
    let server = Process::start(Setup::of(&subject));
    let template = Template::new();
    let writer = server.client();
    template.put(&writer, "a", 1, Condition::New).unwrap();
    let (done, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    let (middle, end) = thread::scope(|scope| {
        let readers: Vec<_> = (0..READERS)
            .map(|_| {
                let client = server.client();
                let (done, reads) = (&done, &reads);
                scope.spawn(move || {
                    let mut last = 0;
                    while !done.load(Ordering::Relaxed) {
                        // Get the current version.
                        let lease = client.get(&Get::new("a")).unwrap();
                        let version = lease.version();
                        assert!(version >= last, "version {version} after {last}");
                        last = version;
                        // The version number equals the put's number, which determines the segment count.
                        assert_eq!(whole(lease), version);
                        reads.fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        let mut middle = 0;
        for version in 2..=replacements {
            if readers.iter().any(|reader| reader.is_finished()) {
                break;
            }
            assert_eq!(template.put(&writer, "a", version, Condition::Version(version - 1)).unwrap(), version);
            // Replaced versions are closed shortly afterwards; on a busy machine many more replacements may happen first.
            until(|| server.memory_files() <= MOST);
            if version == replacements / 2 {
                middle = server.resident();
            }
        }
        done.store(true, Ordering::Relaxed);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        (middle, server.resident())
    });
    let reads = reads.into_inner();
    eprintln!("{replacements} versions, {reads} reads; {middle} KiB resident in the middle, {end} KiB at the end");
    assert!(reads >= READERS as u64);
    assert!(end <= middle + 2048, "from {middle} KiB to {end} KiB");
    server.wait_for_ends(&writer);
    assert_eq!(writer.stat("a", None).unwrap().version.versions, [replacements]);
    let pages = pages_of(replacements) as usize;
    until(|| server.memory_files() == pages + 1);
}
