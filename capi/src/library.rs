//! The library's version and log.

use std::{
    ffi::{CStr, c_char, c_void},
    fmt::{self, Write as _},
    ptr,
    sync::{
        Mutex, Once,
        atomic::{AtomicPtr, Ordering},
    },
};

use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    level_filters::LevelFilter,
    span,
};

use vmmfd::bindings::lock;

use crate::{
    error::{Failure, run, vmmfd_error_t},
    owned::c_text,
};

const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
    Ok(version) => version,
    Err(_) => panic!("the version has a null character"),
};

/// Returns the library's version, such as `0.1.0`. The text is static. Never fails and does not block.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_library_version() -> *const c_char {
    VERSION.as_ptr()
}

/// A time limit that never passes.
pub const VMMFD_FOREVER: u64 = u64::MAX;

/// The level of a log line.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum vmmfd_level_t {
    /// No line: the hook is not called.
    VMMFD_LOG_OFF = 0,
    /// A failure that no call reports, such as a failure to release memory.
    VMMFD_LOG_ERROR = 1,
    /// A problem that the library handles.
    VMMFD_LOG_WARN = 2,
    /// Rare events.
    VMMFD_LOG_INFO = 3,
    /// Each record to and from a peer.
    VMMFD_LOG_DEBUG = 4,
    /// Everything.
    VMMFD_LOG_TRACE = 5,
}

/// Receives one line of the log, without a line break. `message` is valid during the call. `context` is the program's own.
///
/// Any thread calls it, also threads of the library, and several at once. It must return soon, and must not call this library, throw or
/// jump.
pub type vmmfd_log_hook_t = Option<extern "C" fn(level: vmmfd_level_t, message: *const c_char, context: *mut c_void)>;

// SAFETY: the library only passes the context on, and the header documents that any thread may call the hook.
unsafe impl Sync for Hook {}

/// The program's hook.
struct Hook {
    level: u32,
    call: extern "C" fn(vmmfd_level_t, *const c_char, *mut c_void),
    context: *mut c_void,
}

/// All hooks of this process. They are kept: another thread may be in a replaced hook.
static HOOKS: Mutex<Vec<&Hook>> = Mutex::new(Vec::new());

/// The current hook.
static HOOK: AtomicPtr<Hook> = AtomicPtr::new(ptr::null_mut());

/// Passes the library's log to a function of the program: lines up to `level`, one of `vmmfd_level_t`. By default there is no log.
///
/// `hook` NULL or level `VMMFD_LOG_OFF` stops the log. The library keeps `context` and does not use it. Another thread may still be in the
/// previous hook when this returns, so its context must remain valid. Does not block. Any thread may call it; each call allocates some
/// bytes for the rest of the process.
///
/// Errors: `VMMFD_INVALID` for an unknown level, or if the program is in Rust and has its own `tracing` subscriber.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_log_set(level: u32, hook: vmmfd_log_hook_t, context: *mut c_void) -> *mut vmmfd_error_t {
    run(|| {
        if level > vmmfd_level_t::VMMFD_LOG_TRACE as u32 {
            return Err(Failure::invalid(format!("level {level} is unknown: use a value of vmmfd_level_t")));
        }
        let Some(call) = hook.filter(|_| level > 0) else {
            HOOK.store(ptr::null_mut(), Ordering::Release);
            return Ok(());
        };
        static STARTED: Once = Once::new();
        let mut taken = false;
        STARTED.call_once(|| taken = tracing::subscriber::set_global_default(ToHook).is_err());
        if taken {
            return Err(Failure::invalid("this program has a tracing subscriber of its own: it receives the log"));
        }
        let hook: &'static Hook = Box::leak(Box::new(Hook { level, call, context }));
        lock(&HOOKS).push(hook);
        HOOK.store(ptr::from_ref(hook).cast_mut(), Ordering::Release);
        tracing::callsite::rebuild_interest_cache();
        Ok(())
    })
}

fn hook() -> Option<&'static Hook> {
    // SAFETY: the pointer is null or from `vmmfd_log_set`; the hook is only read.
    unsafe { HOOK.load(Ordering::Acquire).as_ref() }
}

fn number(level: &Level) -> (u32, vmmfd_level_t) {
    let level = match *level {
        Level::ERROR => vmmfd_level_t::VMMFD_LOG_ERROR,
        Level::WARN => vmmfd_level_t::VMMFD_LOG_WARN,
        Level::INFO => vmmfd_level_t::VMMFD_LOG_INFO,
        Level::DEBUG => vmmfd_level_t::VMMFD_LOG_DEBUG,
        _ => vmmfd_level_t::VMMFD_LOG_TRACE,
    };
    (level as u32, level)
}

/// Passes events to the hook, and ignores spans.
struct ToHook;

impl Subscriber for ToHook {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        hook().is_some_and(|hook| number(metadata.level()).0 <= hook.level)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(match hook().map_or(0, |hook| hook.level) {
            0 => LevelFilter::OFF,
            1 => LevelFilter::ERROR,
            2 => LevelFilter::WARN,
            3 => LevelFilter::INFO,
            4 => LevelFilter::DEBUG,
            _ => LevelFilter::TRACE,
        })
    }

    fn register_callsite(&self, _: &'static Metadata<'static>) -> tracing::subscriber::Interest {
        // The hook may change at any time.
        tracing::subscriber::Interest::sometimes()
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let Some(hook) = hook() else { return };
        let mut line = Line::default();
        event.record(&mut line);
        let text = c_text(line.message + &line.fields);
        (hook.call)(number(event.metadata().level()).1, text.as_ptr(), hook.context);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// The message of an event, and its other fields as ` name=value`.
#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a String can't fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}
