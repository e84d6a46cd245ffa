use super::{Bucket, TokenBucket};
use crate::limit::rule::{Rule, SLACK};

impl Rule for TokenBucket {
    type State = Bucket;

    #[inline]
    fn read(&self, bucket: &mut Bucket, now: u64, _: u64) -> u64 {
        bucket.spent = bucket.spent.min(self.cap);
        let gone = bucket.at > now && bucket.at > now + SLACK.min(self.time(self.quota()));
        if gone || self.come(bucket.spent, now.saturating_sub(bucket.since)) {
            *bucket = Bucket {
                since: now,
                spent: 0,
                at: now,
            };
        }
        let come = self.tokens(now.saturating_sub(bucket.since));
        self.quota().saturating_add(come).saturating_sub(bucket.spent)
    }

    #[inline]
    fn add(&self, bucket: &mut Bucket, now: u64, weight: u64, _: u64) {
        if bucket.spent == 0 {
            bucket.since = now;
        }
        bucket.at = bucket.at.max(now);

        // The tokens of whole periods are subtracted before the numbers become too large.
        if bucket.spent + weight > self.cap {
            let (rate, period) = self.reduced;
            let periods = now.saturating_sub(bucket.since) / period;
            bucket.since += periods * period;
            bucket.spent -= (periods * rate).min(bucket.spent);
        }
        bucket.spent = (bucket.spent + weight).min(self.cap);
    }

    fn wait(&self, bucket: &Bucket, now: u64, cost: u64) -> u64 {
        let missing = (bucket.spent + cost).saturating_sub(self.quota()).min(bucket.spent);
        (bucket.since + self.time(missing)).saturating_sub(now).max(1)
    }

    #[inline]
    fn reset(&self, bucket: &Bucket, now: u64) -> u64 {
        match bucket.spent {
            0 => 0,
            spent => (bucket.since + self.time(spent)).saturating_sub(now),
        }
    }

    fn give_back(&self, bucket: &mut Bucket, now: u64, at: u64, weight: u64) -> bool {
        // After the last charge, all missing tokens are those of the charge. After an earlier one, those that came since then may
        // all be those of the charge.
        let is_last = at >= bucket.at;
        let passed = if is_last { 0 } else { now.saturating_sub(at) };
        // The rate has returned all tokens that were taken before the bucket was last full.
        let counts = bucket.spent > 0 && at >= bucket.since && !self.come(weight, passed);
        if !counts {
            return false;
        }

        // A token of which a part has come is not returned, and comes when it would have come.
        let come = self.tokens_rounded_up(passed);
        bucket.since = bucket.since.saturating_sub(self.time_rounded_down(come) - passed);
        bucket.spent = bucket.spent.saturating_sub(weight - come);
        self.read(bucket, now, 0);
        true
    }
}
