//! Scrapes the broker on a separate thread, so that the HTTP server never waits for it.

use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc,
        mpsc::{self, Receiver, Sender},
    },
    thread,
    time::Duration,
};

use nix::sys::eventfd::EventFd;
use vmmfd::{
    broker::Metrics,
    error::{Error, Result},
    internals::eventfd,
};

use super::{
    http::{HttpRequest, Response, Source, Status},
    text::{Format, render},
};

/// The result of a scrape. The error is text because several requests share it.
type Scraped = std::result::Result<Metrics, String>;

/// Answers requests with the broker's metrics. At most one scrape runs; all waiting requests share its result.
pub(crate) struct Scraper {
    timeout: Duration,
    start: Sender<()>,
    results: Receiver<Scraped>,
    /// Readable when a scrape has finished.
    finished: Arc<EventFd>,
    running: bool,
    /// The result of the last scrape. During a scrape, the error for requests that time out.
    latest: Scraped,
    requests: u64,
    unanswered: u64,
}

impl Scraper {
    /// Starts a thread that calls `scrape` until this value is dropped. A request waits for at most `timeout`.
    ///
    /// # Errors
    /// [`Error::System`]. See eventfd(2), pthread_create(3).
    pub(crate) fn start<'scope>(
        scope: &'scope thread::Scope<'scope, '_>,
        timeout: Duration,
        mut scrape: impl FnMut() -> Result<Metrics> + Send + 'scope,
    ) -> Result<Self> {
        let (start, started) = mpsc::channel();
        let (send, results) = mpsc::channel();
        let finished = Arc::new(eventfd()?);
        let finish = Arc::clone(&finished);
        let run = move || {
            for () in started {
                let scraped = scrape().map_err(|error| error.in_full());
                if let Err(error) = &scraped {
                    tracing::warn!(error, "the broker does not answer");
                }
                if send.send(scraped).is_err() || finish.write(1).is_err() {
                    return;
                }
            }
        };
        thread::Builder::new()
            .name("scraper".to_owned())
            .spawn_scoped(scope, run)
            .map_err(|error| Error::system("start a thread", error))?;
        let latest = Err(format!("no answer within {timeout:?}"));
        Ok(Self { timeout, start, results, finished, running: false, latest, requests: 0, unanswered: 0 })
    }

    /// The number of requests, and how many of them the broker did not answer.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.requests, self.unanswered)
    }
}

impl Source for Scraper {
    fn answer(&mut self, request: &HttpRequest) -> Option<Response> {
        self.requests += 1;
        if !matches!(request.path.as_str(), "/metrics" | "/healthz") {
            return Some(Response::sentence(Status::NotFound, "the paths are /metrics and /healthz"));
        }
        if !self.running {
            self.running = true;
            self.latest = Err(format!("no answer within {:?}", self.timeout));
            // If the thread is gone, the request times out.
            let _ = self.start.send(());
        }
        None
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    fn ready(&self) -> BorrowedFd<'_> {
        self.finished.as_fd()
    }

    fn receive(&mut self) -> bool {
        let _ = self.finished.read();
        let Ok(scraped) = self.results.try_recv() else { return false };
        self.running = false;
        self.latest = scraped;
        true
    }

    fn answer_waiting(&mut self, request: &HttpRequest) -> Response {
        self.unanswered += u64::from(self.latest.is_err());
        if request.path == "/metrics" {
            let format = Format::asked(&request.accept);
            let body = render(self.latest.as_ref().ok(), format);
            return Response { status: Status::Ok, content_type: format.content_type(), body };
        }
        match &self.latest {
            Ok(_) => Response::sentence(Status::Ok, "the broker answers"),
            Err(error) => Response::sentence(Status::Unavailable, &format!("the broker does not answer: {error}")),
        }
    }
}
