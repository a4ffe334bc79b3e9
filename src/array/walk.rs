//! Walks two arrays of one shape side by side.

/// Two arrays of one shape, walked together: the longest runs of bytes that are contiguous in both.
#[derive(Debug)]
pub struct Walk {
    /// The length of a run, in bytes; 0 for arrays without elements.
    pub bytes: u64,
    /// For each remaining dimension, outermost first: its length, and its strides in both.
    outer: Vec<(u64, i64, i64)>,
}

impl Walk {
    /// `a` and `b` are the strides of both arrays in bytes, and `item` is the size of an element.
    pub fn new(shape: &[u64], item: u64, a: &[i64], b: &[i64]) -> Self {
        if shape.contains(&0) {
            return Self { bytes: 0, outer: Vec::new() };
        }
        let mut bytes = item;
        let mut outer = Vec::new();
        for ((length, a), b) in shape.iter().zip(a).zip(b).rev() {
            match *length {
                1 => {}
                length if outer.is_empty() && *a == bytes as i64 && *b == bytes as i64 => bytes *= length,
                length => outer.push((length, *a, *b)),
            }
        }
        outer.reverse();
        Self { bytes, outer }
    }

    /// Whether all elements are one run.
    pub fn is_one_run(&self) -> bool {
        self.outer.is_empty()
    }

    /// Calls a function for each run, in C order, with its offsets in both arrays from the element with all indices 0, until an error.
    ///
    /// # Errors
    /// Of the function.
    pub fn each_run<E>(&self, mut call: impl FnMut(i64, i64) -> Result<(), E>) -> Result<(), E> {
        if self.bytes == 0 {
            return Ok(());
        }
        let mut index = vec![0; self.outer.len()];
        let mut a = 0i64;
        let mut b = 0i64;
        loop {
            call(a, b)?;
            let mut axis = self.outer.len();
            loop {
                if axis == 0 {
                    return Ok(());
                }
                axis -= 1;
                let (length, step_a, step_b) = self.outer[axis];
                index[axis] += 1;
                a = a.wrapping_add(step_a);
                b = b.wrapping_add(step_b);
                if index[axis] < length {
                    break;
                }
                a = a.wrapping_sub(step_a.wrapping_mul(length as i64));
                b = b.wrapping_sub(step_b.wrapping_mul(length as i64));
                index[axis] = 0;
            }
        }
    }
}
