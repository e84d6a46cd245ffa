use super::{trial::Stores, world::World};

/// The most runs of parts of a world.
const MOST_RUNS: usize = 1_500;

/// A part of a world that still fails, and how: no call, request or charge is left that could be left out.
pub(super) async fn shrunk(stores: &Stores, mut world: World, mut failure: String) -> (World, String) {
    let mut runs = 0;
    let mut attempt = async |part: World| {
        runs += 1;
        match runs < MOST_RUNS {
            true => stores.run(&part).await.err().map(|failure| (part, failure)),
            false => None,
        }
    };

    // Many calls at a time first, then fewer.
    let mut size = world.calls.len().div_ceil(2);
    while size > 0 {
        let mut from = 0;
        while from < world.calls.len() {
            let mut part = world.clone();
            part.calls.drain(from..(from + size).min(world.calls.len()));
            match attempt(part).await {
                Some(failing) => (world, failure) = failing,
                None => from += size,
            }
        }
        size = if size == 1 { 0 } else { size.div_ceil(2) };
    }
    for call in (0..world.calls.len()).rev() {
        let mut size = world.calls[call].requests.len().div_ceil(2);
        while size > 0 {
            let mut from = 0;
            while from < world.calls[call].requests.len() {
                let mut part = world.clone();
                let upto = (from + size).min(world.calls[call].requests.len());
                part.calls[call].requests.drain(from..upto);
                match attempt(part).await {
                    Some(failing) => (world, failure) = failing,
                    None => from += size,
                }
            }
            size = if size == 1 { 0 } else { size.div_ceil(2) };
        }
        for request in 0..world.calls[call].requests.len() {
            for charge in (0..world.calls[call].requests[request].charges.len()).rev() {
                let mut part = world.clone();
                part.calls[call].requests[request].charges.remove(charge);
                if let Some(failing) = attempt(part).await {
                    (world, failure) = failing;
                }
            }
        }
    }
    world.calls.retain(|call| !call.requests.is_empty());
    (world, failure)
}
