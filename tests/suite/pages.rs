//! The Rust blocks of the pages, run. Each is in its page word for word, except for the indentation; as a doctest of the page it compiles
//! alone, but does not run.

use std::path::PathBuf;

use tempfile::TempDir;
use vmmfd::{
    driver::Driver,
    memory::{Device, Region, Selector, Shared, Spec},
};

use crate::support::Subject;

/// A folder for a socket, and a driver.
struct Place {
    _folder: TempDir,
    path: PathBuf,
    subject: Subject,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self { path: folder.path().join("page.sock"), _folder: folder, subject: Subject::host() }
    }

    fn driver(&self) -> &Driver {
        &self.subject.driver
    }

    fn device(&self) -> Device {
        Device::find(self.driver(), Selector::default()).unwrap()
    }

    fn memory(&self, size: u64) -> Shared {
        Shared::create(&self.device(), Spec::vmm(size)).unwrap()
    }
}

fn bytes<const N: usize>(memory: &impl Region, offset: u64) -> [u8; N] {
    let mut bytes = [0; N];
    memory.copy_out(offset, &mut bytes).unwrap();
    bytes
}

mod handoff {
    use std::path::Path;

    use vmmfd::{
        channel::Listener,
        driver::Driver,
        memory::{Device, Region, Selector, Shared, Spec},
        session::{
            Config,
            handoff::{Buffer, ServeOptions, Unchecked, serve},
        },
    };

    fn share(path: &Path, driver: &Driver) -> vmmfd::Result<()> {
        let device = Device::find(driver, Selector::default())?;
        let memory = Shared::create(&device, Spec::vmm(1 << 20))?;
        memory.copy_in(0, b"frame")?; // Or kernels on `memory.address()`.
        let (buffer, config) = (Buffer::new(memory, Unchecked, None)?, Config::default());
        let listener = Listener::bind(path, &config)?;
        serve(listener, &buffer, &ServeOptions::default(), &config, &|_| {}).into_result()?;
        Ok(())
    }

    mod consumer {
        use std::path::Path;

        use vmmfd::{
            driver::Driver,
            session::{
                Config, Verdict,
                handoff::{Consumer, ImportedObject, Request},
            },
        };

        fn receive(path: &Path, driver: &Driver) -> vmmfd::Result<ImportedObject> {
            let mut consumer = Consumer::connect(driver, None, path, &Config::default(), &|_| {})?;
            let memory = consumer.request(&Request::default())?; // Mapped, ready to use.
            consumer.report(&memory, &Verdict::unchecked(true))?; // The producer waits for this result.
            consumer.close();
            Ok(memory) // It stays mapped.
        }

        #[test]
        fn shared_buffer_is_received() {
            let place = super::super::Place::new();
            std::thread::scope(|scope| {
                let producer = scope.spawn(|| super::share(&place.path, place.driver()));
                let memory = receive(&place.path, place.driver()).unwrap();
                producer.join().unwrap().unwrap();
                assert_eq!(&super::super::bytes(&memory, 0), b"frame");
            });
        }
    }
}

mod two_streams {
    use std::{error::Error, os::fd::AsFd};

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use vmmfd::session::stream::{Sample, Subscriber};

    /// Waits for either stream. `None`: no frame yet, call it again.
    fn next(streams: &[Subscriber; 2]) -> Result<Option<Sample>, Box<dyn Error>> {
        let mut fds = streams.each_ref().map(|stream| PollFd::new(stream.as_fd(), PollFlags::POLLIN));
        poll(&mut fds, PollTimeout::NONE)?;
        for stream in streams {
            if let Some(received) = stream.try_receive()? {
                return Ok(received.sample());
            }
        }
        Ok(None)
    }

    #[test]
    fn frame_of_either_stream_arrives() {
        use std::time::Duration;

        use vmmfd::session::{
            Config,
            stream::{PublishOptions, Publisher, SubscribeOptions},
        };

        let places = [super::Place::new(), super::Place::new()];
        let (config, options) = (Config::default(), PublishOptions::fixed(100, 4).history(1));
        let publishers = places.each_ref().map(|place| {
            let publisher = Publisher::create(&place.device(), &options, &config).unwrap();
            publisher.listen(&place.path).unwrap();
            publisher
        });
        publishers[1].loan(Duration::ZERO).unwrap().publish(&[7]).unwrap();
        let options = SubscribeOptions::default().history(1);
        let streams = places
            .each_ref()
            .map(|place| Subscriber::connect(place.driver(), None, &place.path, &options, &config).unwrap());
        let found = loop {
            if let Some(found) = next(&streams).unwrap() {
                break found;
            }
        };
        assert_eq!(found.user(), [7]);
    }
}

mod passed_on {
    use std::{io, os::fd::OwnedFd};

    use vmmfd::{
        driver::{Access, Driver},
        memory::{Array, ArrayHandle},
    };

    /// Opens memory, and returns descriptors for the next process too. The handle and the descriptors came from the owner.
    fn open_and_keep(
        driver: &Driver,
        handle: &ArrayHandle,
        fds: Vec<OwnedFd>,
    ) -> Result<(Array, Vec<OwnedFd>), Box<dyn std::error::Error>> {
        let kept = fds.iter().map(OwnedFd::try_clone).collect::<io::Result<_>>()?;
        let array = handle.open(driver, None, fds, Access::ReadWrite)?;
        Ok((array, kept))
    }

    #[test]
    fn kept_descriptors_open_the_memory() {
        use vmmfd::{
            array::{ArrayDescriptor, Order},
            memory::Region,
        };

        let place = super::Place::new();
        let shared = place.memory(100);
        shared.copy_in(0, b"first").unwrap();
        let array = ArrayDescriptor::new("u8".parse().unwrap(), [100], Order::C).unwrap();
        let (handle, fds) = ArrayHandle::of(&shared, array).unwrap();
        let (mine, kept) = open_and_keep(place.driver(), &handle, fds).unwrap();
        drop((shared, mine));
        let theirs = handle.open(place.driver(), None, kept, Access::ReadOnly).unwrap();
        let mut bytes = [0; 5];
        theirs.memory().copy_out(0, &mut bytes).unwrap();
        assert_eq!(&bytes, b"first");
    }
}

mod arrays {
    use vmmfd::{
        array::{ArrayDescriptor, Order},
        driver::{Access, Driver},
        memory::{ArrayHandle, Shared},
    };

    fn print_row(shared: &Shared, driver: &Driver) -> Result<(), Box<dyn std::error::Error>> {
        let array = ArrayDescriptor::new("f32".parse()?, [1024, 768], Order::C)?;
        let (handle, fds) = ArrayHandle::of(shared, array)?;
        let array = handle.open(driver, None, fds, Access::ReadOnly)?; // In the other process.
        let row = array.index(0, 7)?; // A view, which keeps the memory.
        println!("{:?} at {:?}", row.first(3)?, row.interface()?.data);
        Ok(())
    }

    #[test]
    fn row_is_a_view() {
        let place = super::Place::new();
        print_row(&place.memory(32 << 20), place.driver()).unwrap();
    }
}

mod mirrors {
    use vmmfd::memory::{Mirror, Shared};

    fn change(shared: &Shared) -> vmmfd::Result<()> {
        let mut mirror = Mirror::of(shared, 4 << 20, 4096)?;
        mirror.write(0, b"changed")?;
        mirror.commit()
    }

    #[test]
    fn commit_writes_to_the_memory() {
        let place = super::Place::new();
        let shared = place.memory(32 << 20);
        change(&shared).unwrap();
        assert_eq!(&super::bytes(&shared, 4 << 20), b"changed");
    }
}

mod kinds {
    use vmmfd::{
        memory::{Device, Region, Shared, Spec},
        session::handoff::Request,
    };

    /// In chunks: a consumer that requests a part gets and maps only the chunks that cover it.
    fn chunked(device: &Device) -> vmmfd::Result<(Shared, Request)> {
        Ok((Shared::create(device, Spec::vmm(32 << 20).chunk(4 << 20))?, Request::default().range(4 << 20..5 << 20)))
    }

    /// Filled once, then immutable. Returns whether the kernel enforces it: on the host backend it does, on a GPU it is an agreement.
    fn sealed(device: &Device) -> vmmfd::Result<bool> {
        let shared = Shared::create(device, Spec::vmm(100).sealed())?;
        shared.copy_in(0, b"final")?;
        shared.seal()
    }

    #[test]
    fn chunks_and_seals_are_made() {
        let place = super::Place::new();
        let (shared, _part) = chunked(&place.device()).unwrap();
        assert_eq!(shared.size(), 32 << 20);
        assert!(sealed(&place.device()).unwrap());
    }
}

mod broker {
    use std::path::Path;

    use vmmfd::{
        broker::{Client, Get, Put, PutPart},
        driver::Driver,
        memory::{Device, Region, Selector, Shared, Spec},
        session::Config,
    };

    fn put_and_get(path: &Path, driver: &Driver) -> vmmfd::Result<()> {
        let device = Device::find(driver, Selector::default())?;
        let memory = Shared::create(&device, Spec::vmm(1 << 20))?;
        memory.copy_in(0, b"weights")?; // Or kernels on `memory.address()`.
        let maker = Client::connect(path, &Config::default())?;
        maker.put(&Put::new("models/tiny").part(PutPart::of("all", &memory)?))?;
        drop((memory, maker)); // The maker may go.

        let reader = Client::connect(path, &Config::default())?;
        let object = reader.get(&Get::new("models/tiny"))?.open(driver, None)?; // Mapped read-only.
        let weights = object.part("all").expect("the part that was put").memory()?;
        let mut bytes = [0; 7];
        weights.copy_out(0, &mut bytes)?;
        assert_eq!(&bytes, b"weights");
        Ok(())
    }

    #[test]
    fn object_outlives_its_maker() {
        use vmmfd::{
            broker::{Server, ServerConfig},
            channel::{Cancel, CancelReason},
        };

        let place = super::Place::new();
        let cancel = Cancel::new().unwrap();
        let server = Server::bind(&place.path, ServerConfig::default(), &cancel).unwrap();
        let serving = std::thread::spawn(move || server.run());
        put_and_get(&place.path, place.driver()).unwrap();
        cancel.cancel(CancelReason::Program);
        assert_eq!(serving.join().unwrap().unwrap().objects, 1);
    }
}

mod streams {
    use std::{path::Path, thread, time::Duration};

    use vmmfd::{
        driver::Driver,
        memory::{Device, Region, Selector},
        session::{
            Config,
            stream::{PublishOptions, Publisher, Received, SubscribeOptions, Subscriber},
        },
    };

    const LIMIT: Duration = Duration::from_secs(10); // Of each call.

    fn publish(path: &Path, driver: &Driver) -> vmmfd::Result<()> {
        let device = Device::find(driver, Selector::default())?;
        let options = PublishOptions::fixed(1 << 20, 8).history(5); // Eight buffers of 1 MiB.
        let publisher = Publisher::create(&device, &options, &Config::default())?;
        publisher.listen(path)?; // Subscribers come and go from now on.
        while publisher.event().is_none() {
            thread::sleep(Duration::from_millis(1)); // Only this example waits for a subscriber.
        }
        for number in 0..5 {
            let frame = publisher.loan(LIMIT)?;
            frame.copy_in(0, &[number])?; // Or kernels on `frame.address()`.
            frame.publish(b"left eye")?; // Waits for the GPU, and for no subscriber.
        }
        publisher.finish(LIMIT)?; // Until everything is given back.
        Ok(())
    }

    fn subscribe(path: &Path, driver: &Driver) -> vmmfd::Result<u64> {
        let options = SubscribeOptions::default().history(5); // The newest frame, and up to five earlier ones.
        let subscriber = Subscriber::connect(driver, None, path, &options, &Config::default())?;
        let mut frames = 0;
        while let Received::Sample(frame) = subscriber.receive(LIMIT)? {
            let mut byte = [0];
            frame.copy_out(0, &mut byte)?; // A region, mapped read-only.
            frames += 1 + frame.skipped_before();
            assert_eq!(u64::from(byte[0]) + 1, frame.number());
        } // The end of the block gives the frame back.
        Ok(frames)
    }

    #[test]
    fn five_frames_pass() {
        let place = super::Place::new();
        thread::scope(|scope| {
            let subscriber = scope.spawn(|| subscribe(&place.path, place.driver()));
            publish(&place.path, place.driver()).unwrap();
            assert!(subscriber.join().unwrap().is_ok_and(|frames| frames <= 5));
        });
    }
}

mod topics {
    use std::time::Duration;

    use vmmfd::{
        broker::Client,
        driver::Driver,
        session::{
            Config,
            stream::{Publisher, SubscribeOptions},
        },
        topic::{self, Change, Follower, Topics},
    };

    fn offer(client: &Client, publisher: &Publisher) -> vmmfd::Result<()> {
        topic::open(client, "camera/left", publisher, None) // Until the publisher finishes or is dropped.
    }

    /// Receives the first frame of any camera, now or later.
    fn watch(client: &Client, driver: &Driver) -> vmmfd::Result<u64> {
        let options = SubscribeOptions::default().history(1);
        let cameras = Follower::new(client, Topics::Prefix("camera/"), driver, None, &options, &Config::default())?;
        loop {
            let update = cameras.receive(Duration::from_secs(10))?;
            match update.change {
                Change::Sample(frame) => return Ok(frame.number()),
                other => println!("{}: {other:?}", update.topic),
            }
        }
    }

    #[test]
    fn first_frame_arrives() {
        let (served, place) = (crate::support::served::Served::alone(&[]), super::Place::new());
        let client = served.client();
        let options = vmmfd::session::stream::PublishOptions::fixed(16, 4).history(1);
        let publisher = Publisher::create(&place.device(), &options, &Config::default()).unwrap();
        offer(&client, &publisher).unwrap();
        publisher.try_loan().unwrap().expect("a buffer").publish(b"").unwrap();
        assert_eq!(watch(&client, place.driver()).unwrap(), 1);
    }
}
