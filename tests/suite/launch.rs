//! A mapping in cudarc's types, compared with this crate's own copies of the same memory.

#![allow(unsafe_code, reason = "launching a kernel")]

use std::ffi::{CString, c_void};

use cudarc::driver::{CudaContext, result, sys};
use vmmfd::launch::{View, ViewMut};

use crate::support::prelude::*;

/// Reads the first word of `n` pages of 4096 bytes.
const GATHER: &str = r"
.version 6.0
.target sm_50
.address_size 64
.visible .entry gather(.param .u64 found, .param .u64 pages, .param .u32 n)
{
    .reg .pred %p;
    .reg .b32 %r<6>;
    .reg .b64 %d<8>;
    ld.param.u64 %d0, [found];
    ld.param.u64 %d1, [pages];
    ld.param.u32 %r0, [n];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.s32 %r4, %r1, %r2, %r3;
    setp.ge.u32 %p, %r4, %r0;
    @%p bra DONE;
    cvta.to.global.u64 %d2, %d0;
    cvta.to.global.u64 %d3, %d1;
    mul.wide.u32 %d4, %r4, 4;
    add.s64 %d5, %d2, %d4;
    mul.wide.u32 %d6, %r4, 4096;
    add.s64 %d7, %d3, %d6;
    ld.global.u32 %r5, [%d7];
    st.global.u32 [%d5], %r5;
DONE:
    ret;
}
";

/// Each version has three segments of 2 MiB.
const SIZE: u64 = 6 << 20;
const PAGES: u32 = (SIZE / 4096) as u32;

mod cuda {
    use super::*;

    #[test]
    #[ignore = "needs an NVIDIA GPU: make test-gpu"]
    fn captured_graph_reads_the_switched_version() {
        let subject = Subject::cuda();
        let broker = Broker::start(&subject);
        let client = broker.client();
        let put = |value: u8| {
            let memory = filled(&subject.driver, SIZE, Some(2 << 20), value);
            let part = PutPart::of("all", &memory).unwrap();
            client.put(&Put::new("weights").condition(Condition::Any).part(part)).unwrap();
        };
        let newest = || client.get(&Get::new("weights")).unwrap();
        put(1);
        let mut object = newest().open(&subject.driver, None).unwrap();
        let address = object.parts()[0].memory().unwrap().address();

        let context = CudaContext::new(subject.device().ordinal() as usize).unwrap();
        let stream = context.new_stream().unwrap();
        let source = CString::new(GATHER).unwrap();
        // SAFETY: the module and the memory outlive the graph. The kernel takes two pointers and a count, and the ranges have that number
        // of words and pages.
        let (module, found, graph) = unsafe {
            let module = result::module::load_data(source.as_ptr().cast()).unwrap();
            let kernel = result::module::get_function(module, CString::new("gather").unwrap()).unwrap();
            let found: sys::CUdeviceptr = result::malloc_sync(4 * PAGES as usize).unwrap();
            let kernel_arguments: (u64, u64, u32) = (found, address, PAGES);
            let mut arguments = [
                (&raw const kernel_arguments.0).cast_mut().cast::<c_void>(),
                (&raw const kernel_arguments.1).cast_mut().cast::<c_void>(),
                (&raw const kernel_arguments.2).cast_mut().cast::<c_void>(),
            ];
            stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
            let grid = (PAGES.div_ceil(128), 1, 1);
            result::launch_kernel(kernel, grid, (128, 1, 1), 0, stream.cu_stream(), &mut arguments).unwrap();
            (module, found, stream.end_capture(sys::CUgraphInstantiate_flags(0)).unwrap().unwrap())
        };
        // Runs the graph and returns the word that all pages have in common.
        let replay = || {
            let mut words = vec![0u32; PAGES as usize];
            // SAFETY: both buffers have this size and no other user; the context is current on this thread.
            unsafe {
                context.bind_to_thread().unwrap();
                result::memset_d8_async(found, 0xEE, 4 * PAGES as usize, stream.cu_stream()).unwrap();
                graph.launch().unwrap();
                stream.synchronize().unwrap();
                result::memcpy_dtoh_sync(&mut words, found).unwrap();
            }
            words.dedup();
            assert_eq!(words.len(), 1, "words of several versions: {words:x?}");
            words[0].to_le_bytes()
        };
        assert_eq!(replay(), [1; 4]);
        put(2);
        let mut other = object.prepare(newest()).unwrap();
        assert_eq!(replay(), [1; 4]);
        for turn in 0..20 {
            other = object.switch(other).unwrap();
            assert_eq!(replay(), [if turn % 2 == 0 { 2 } else { 1 }; 4], "turn {turn}");
        }
        drop(other);
        for value in 3..=5 {
            // No wait is needed for the previous launch: the changes of the mapping wait for it.
            graph.launch().unwrap();
            let parked = if value % 2 == 0 { object.park_with_lease() } else { object.park() };
            parked.unwrap();
            assert!(object.is_parked());
            put(value);
            object.unpark(newest()).unwrap();
            assert_eq!(replay(), [value; 4]);
            object.park_with_lease().unwrap();
            object.unpark(client.get(&Get::new("weights").version(object.version())).unwrap()).unwrap();
            assert_eq!((replay(), object.parts()[0].memory().unwrap().address()), ([value; 4], address));
        }
        drop(graph);
        // SAFETY: the work is finished, and the memory and the module have no other user.
        unsafe {
            result::free_sync(found).unwrap();
            result::module::unload(module).unwrap();
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU: make test-gpu"]
    fn view_is_bounded_by_the_mapping() {
        let subject = Subject::cuda();
        let device = subject.device();
        let allocation = Allocation::create(&device, 1 << 20).unwrap();
        let context = CudaContext::new(device.ordinal() as usize).unwrap();
        let stream = context.default_stream();
        let mapping = Mapping::new(&allocation, ReadOnly).unwrap();
        let refused = ViewMut::<u32>::new(&mapping, &stream, 1).unwrap_err();
        assert!(matches!(refused, Error::Memory(MemoryError::ReadOnly)), "{refused}");
        let length = mapping.size() as usize / 4;
        assert!(View::<u32>::new(&mapping, &stream, length).is_ok());
        for too_many in [length + 1, usize::MAX] {
            let refused = View::<u32>::new(&mapping, &stream, too_many);
            assert!(matches!(refused, Err(Error::Memory(MemoryError::OutOfRange { .. }))));
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU: make test-gpu"]
    fn view_refuses_unaligned_address() {
        let subject = Subject::cuda();
        let memory = LegacyMemory::allocate(&subject.device(), 4096).unwrap();
        let context = CudaContext::new(subject.device().ordinal() as usize).unwrap();
        let stream = context.default_stream();
        for (offset, aligned) in [(0, true), (1, false), (2, false), (4, true)] {
            let part = Shared::in_legacy(&memory, offset, 8).unwrap();
            match View::<u32>::new(&part, &stream, 1) {
                Ok(_) => assert!(aligned, "{offset}"),
                Err(Error::Misuse { problem }) => assert!(!aligned && problem.contains("u32"), "{offset}: {problem}"),
                Err(error) => panic!("{offset}: {error}"),
            }
        }
    }
}
