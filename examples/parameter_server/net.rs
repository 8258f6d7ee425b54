//! The network: 64 inputs, one hidden layer with ReLU, ten classes; and Adam, which trains it.

use crate::data::{CLASSES, Image, PIXELS, Random};

const HIDDEN: usize = 64;
const W1: usize = 0;
const B1: usize = W1 + PIXELS * HIDDEN;
const W2: usize = B1 + HIDDEN;
const B2: usize = W2 + HIDDEN * CLASSES;
/// Numbers in the network.
pub const PARAMETERS: usize = B2 + CLASSES;

/// Weights to begin with: uniform, scaled by the number of inputs (He et al., 2015); biases zero.
pub fn initial() -> Vec<f32> {
    let mut random = Random::new(2);
    let mut weights = vec![0.0; PARAMETERS];
    for (layer, inputs) in [(W1..B1, PIXELS), (W2..B2, HIDDEN)] {
        let scale = (6.0 / inputs as f32).sqrt();
        weights[layer].iter_mut().for_each(|weight| *weight = scale * random.signed());
    }
    weights
}

struct Activity {
    hidden: [f32; HIDDEN],
    /// Probabilities of the classes.
    output: [f32; CLASSES],
}

fn forward(weights: &[f32], image: &Image) -> Activity {
    let mut hidden = [0.0; HIDDEN];
    hidden.copy_from_slice(&weights[B1..W2]);
    for (pixel, row) in image.pixels.iter().zip(weights[W1..B1].chunks_exact(HIDDEN)) {
        hidden.iter_mut().zip(row).for_each(|(h, w)| *h += pixel * w);
    }
    hidden.iter_mut().for_each(|h| *h = h.max(0.0));
    let mut output = [0.0; CLASSES];
    output.copy_from_slice(&weights[B2..]);
    for (h, row) in hidden.iter().zip(weights[W2..B2].chunks_exact(CLASSES)) {
        output.iter_mut().zip(row).for_each(|(o, w)| *o += h * w);
    }
    // Softmax; the largest is taken off so that nothing overflows.
    let largest = output.iter().copied().fold(f32::MIN, f32::max);
    output.iter_mut().for_each(|o| *o = (*o - largest).exp());
    let sum: f32 = output.iter().sum();
    output.iter_mut().for_each(|o| *o /= sum);
    Activity { hidden, output }
}

/// Adds the gradient of the cross entropy for one image, times `scale`.
pub fn add_gradient(weights: &[f32], image: &Image, scale: f32, gradient: &mut [f32]) {
    let Activity { hidden, mut output } = forward(weights, image);
    output[image.digit] -= 1.0;
    output.iter_mut().for_each(|o| *o *= scale);
    let mut back = [0.0; HIDDEN];
    for (i, h) in hidden.iter().enumerate() {
        let row = W2 + i * CLASSES;
        for (j, o) in output.iter().enumerate() {
            gradient[row + j] += h * o;
            back[i] += weights[row + j] * o;
        }
        if *h <= 0.0 {
            back[i] = 0.0;
        }
    }
    gradient[B2..].iter_mut().zip(output).for_each(|(g, o)| *g += o);
    gradient[B1..W2].iter_mut().zip(back).for_each(|(g, b)| *g += b);
    for (pixel, row) in image.pixels.iter().zip(gradient[W1..B1].chunks_exact_mut(HIDDEN)) {
        row.iter_mut().zip(back).for_each(|(g, b)| *g += pixel * b);
    }
}

/// The part of the images whose digit is told.
pub fn accuracy(weights: &[f32], images: &[Image]) -> f32 {
    let right = images.iter().filter(|image| {
        let output = forward(weights, image).output;
        let best = output.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(digit, _)| digit);
        best == Some(image.digit)
    });
    right.count() as f32 / images.len().max(1) as f32
}

/// Adam (Kingma and Ba, 2015), with the paper's constants and a rate of 0.002.
pub struct Adam {
    mean: Vec<f32>,
    square: Vec<f32>,
    step: i32,
}

impl Adam {
    pub fn new() -> Self {
        Adam { mean: vec![0.0; PARAMETERS], square: vec![0.0; PARAMETERS], step: 0 }
    }

    pub fn apply(&mut self, weights: &mut [f32], gradient: &[f32]) {
        const RATE: f32 = 0.002;
        const B1: f32 = 0.9;
        const B2: f32 = 0.999;
        self.step = self.step.saturating_add(1);
        let (c1, c2) = (1.0 - B1.powi(self.step), 1.0 - B2.powi(self.step));
        for (((weight, &g), m), s) in weights.iter_mut().zip(gradient).zip(&mut self.mean).zip(&mut self.square) {
            *m = B1 * *m + (1.0 - B1) * g;
            *s = B2 * *s + (1.0 - B2) * g * g;
            *weight -= RATE * (*m / c1) / ((*s / c2).sqrt() + 1e-8);
        }
    }
}

/// The bytes of numbers, little-endian, as they travel.
pub fn to_bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

pub fn from_bytes(bytes: &[u8], numbers: &mut [f32]) {
    for (number, bytes) in numbers.iter_mut().zip(bytes.chunks_exact(4)) {
        *number = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data;

    fn loss(weights: &[f32], image: &Image) -> f64 {
        -f64::from(forward(weights, image).output[image.digit]).ln()
    }

    #[test]
    fn the_gradient_is_that_of_the_loss() {
        let image = &data::load().unwrap().0[0];
        let mut weights = initial();
        let mut gradient = vec![0.0; PARAMETERS];
        add_gradient(&weights, image, 1.0, &mut gradient);
        let mut checked = 0;
        for i in (0..PARAMETERS).step_by(37).chain([B1, W2, B2]) {
            let (old, step) = (weights[i], 1e-2);
            weights[i] = old + step;
            let above = loss(&weights, image);
            weights[i] = old - step;
            let below = loss(&weights, image);
            weights[i] = old;
            let numeric = (above - below) / (2.0 * f64::from(step));
            assert!((numeric - f64::from(gradient[i])).abs() < 1e-2, "parameter {i}: {numeric} and {}", gradient[i]);
            checked += usize::from(numeric.abs() > 1e-3);
        }
        assert!(checked > 10, "most gradients were zero");
    }

    /// Whatever the size of the gradient, Adam's first step is as long as its rate.
    #[test]
    fn the_first_step_goes_down_by_the_rate() {
        let mut weights = vec![1.0; PARAMETERS];
        let gradient: Vec<f32> = (0..PARAMETERS).map(|i| if i % 2 == 0 { 3.0 } else { -0.01 }).collect();
        Adam::new().apply(&mut weights, &gradient);
        for (weight, g) in weights.iter().zip(&gradient) {
            assert!((1.0 - weight - 0.002 * g.signum()).abs() < 1e-6, "{weight} after a gradient of {g}");
        }
    }

    #[test]
    fn a_little_training_goes_a_long_way() {
        let (train, test) = data::load().unwrap();
        let (mut weights, mut adam, mut random) = (initial(), Adam::new(), Random::new(3));
        assert!(accuracy(&weights, &test) < 0.3, "without training");
        for _ in 0..150 {
            let mut gradient = vec![0.0; PARAMETERS];
            (0..16).for_each(|_| add_gradient(&weights, &train[random.below(train.len())], 1.0 / 16.0, &mut gradient));
            adam.apply(&mut weights, &gradient);
        }
        let reached = accuracy(&weights, &test);
        assert!(reached > 0.8, "{reached}");
    }

    #[test]
    fn numbers_survive() {
        let numbers = [1.5, -0.0, f32::MAX];
        let mut back = [0.0; 3];
        from_bytes(&to_bytes(&numbers), &mut back);
        assert_eq!(numbers, back);
    }
}
