// limits
import io.github.bucket4j.Bucket;
import io.github.bucket4j.ConsumptionProbe;
import java.time.Duration;
// rest

class Worker {
  void mail(String to) throws Exception {
    // limits
    Bucket mails = Limits.BUCKETS.getProxy("mails:" + to, () -> Limits.window(3, Duration.ofHours(1)));
    ConsumptionProbe probe = mails.tryConsumeAndReturnRemaining(1);
    if (!probe.isConsumed()) {
      Duration wait = Duration.ofNanos(probe.getNanosToWaitForRefill());
      throw new IllegalStateException("too many mails; retry in " + wait);
    }
    try {
      // rest
      send(to);
      // limits
    } catch (Exception e) {
      mails.addTokens(1);
      throw e;
    }
    // rest
  }

  String complete(String user, String prompt, long estimate) {
    // limits
    Bucket tokens = Limits.BUCKETS.getProxy("tokens:" + user, () -> Limits.window(10_000, Duration.ofHours(1)));
    ConsumptionProbe probe = tokens.tryConsumeAndReturnRemaining(estimate);
    if (!probe.isConsumed()) {
      Duration wait = Duration.ofNanos(probe.getNanosToWaitForRefill());
      throw new IllegalStateException("too many tokens; retry in " + wait);
    }
    // rest
    Completion completion = model(prompt);
    // limits
    if (completion.tokens() < estimate) {
      tokens.addTokens(estimate - completion.tokens());
    } else if (completion.tokens() > estimate) {
      tokens.consumeIgnoringRateLimits(completion.tokens() - estimate);
    }
    // rest
    return completion.text();
  }

  record Completion(String text, long tokens) {}

  void send(String to) throws Exception {}

  Completion model(String prompt) {
    return new Completion("", 1);
  }
}
