mod descriptor;
mod element;
mod format;
mod interface;
mod json;
mod properties;
mod shape;

use std::fmt;

use super::*;
use crate::base::Access;
use crate::error::{Error, MemoryError, Result};

const F4: ElementType = ElementType::F32;
const U1: ElementType = ElementType::U8;

fn element(text: &str) -> ElementType {
    text.parse().unwrap()
}

fn array(text: &str, shape: &[u64], strides: Option<&[i64]>, offset: u64) -> ArrayDescriptor {
    let strides = strides.map(<[i64]>::to_vec);
    ArrayDescriptor { dtype: element(text), shape: shape.to_vec(), strides, offset }
}

/// A contiguous `float32` array in C order.
fn floats(shape: &[u64]) -> ArrayDescriptor {
    ArrayDescriptor::new(F4, shape, Order::C).unwrap()
}

#[track_caller]
fn refused<T: fmt::Debug>(result: Result<T>, part: &str) {
    match result {
        Err(Error::Memory(MemoryError::Array { problem })) => assert!(problem.contains(part), "{problem}"),
        other => panic!("expected the error {part}, got {other:?}"),
    }
}

fn is_contiguous(array: &ArrayDescriptor, order: Order) -> bool {
    array.steps_are(order, &array.steps().unwrap())
}
