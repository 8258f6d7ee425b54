//! The images, and the random numbers that shuffle them.

use anyhow::{Context, Result, ensure};

pub const PIXELS: usize = 64;
pub const CLASSES: usize = 10;
/// Images that are kept back for the test.
const HELD_OUT: usize = 360;

pub struct Image {
    pub pixels: [f32; PIXELS],
    pub digit: usize,
}

/// Images to train on, and images to test with. The split is the same in every process.
pub fn load() -> Result<(Vec<Image>, Vec<Image>)> {
    let text = include_str!("../data/digits.csv");
    let mut images = text.lines().map(parse).collect::<Result<Vec<_>>>()?;
    Random::new(1).shuffle(&mut images);
    let test = images.split_off(images.len().saturating_sub(HELD_OUT));
    Ok((images, test))
}

fn parse(line: &str) -> Result<Image> {
    let mut numbers = line.split(',').map(|number| number.parse::<u8>().with_context(|| format!("{number:?} in digits.csv")));
    let mut pixels = [0.0; PIXELS];
    for pixel in &mut pixels {
        *pixel = f32::from(numbers.next().context("a line of digits.csv is short")??) / 16.0;
    }
    let digit = usize::from(numbers.next().context("a line of digits.csv is short")??);
    ensure!(digit < CLASSES, "digits.csv names the digit {digit}");
    ensure!(numbers.next().is_none(), "a line of digits.csv is long");
    Ok(Image { pixels, digit })
}

/// SplitMix64 (Steele, Lea and Flood, 2014).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    /// Between -1 and 1.
    pub fn signed(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first numbers of the reference implementation for this seed.
    #[test]
    fn random_numbers_are_those_of_splitmix64() {
        let mut random = Random::new(1_234_567);
        assert_eq!([random.next(), random.next()], [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]);
        assert!((0..1000).all(|_| random.below(7) < 7 && (-1.0..1.0).contains(&random.signed())));
    }

    #[test]
    fn what_is_no_image_is_refused() {
        let pixels = "16,".repeat(PIXELS);
        assert_eq!(parse(&format!("{pixels}9")).unwrap().pixels, [1.0; PIXELS]);
        for line in ["", "1,2,3", &pixels, &format!("{pixels}10"), &format!("{pixels}x"), &format!("{pixels}9,0")] {
            assert!(parse(line).is_err(), "{line:?}");
        }
    }

    #[test]
    fn all_images_are_there_and_split_alike() {
        let (train, test) = load().unwrap();
        assert_eq!((train.len(), test.len()), (1797 - HELD_OUT, HELD_OUT));
        let again = load().unwrap().1;
        assert!(test.iter().zip(&again).all(|(a, b)| a.pixels == b.pixels && a.digit == b.digit));
        assert!((0..CLASSES).all(|digit| test.iter().filter(|image| image.digit == digit).count() > 20));
    }
}
