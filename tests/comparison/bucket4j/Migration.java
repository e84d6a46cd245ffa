// limits
import io.github.bucket4j.Bucket;
import io.github.bucket4j.BucketConfiguration;
import io.github.bucket4j.ConsumptionProbe;
import jakarta.servlet.FilterChain;
import jakarta.servlet.ServletException;
import jakarta.servlet.http.HttpFilter;
import jakarta.servlet.http.HttpServletRequest;
import jakarta.servlet.http.HttpServletResponse;
import java.io.IOException;
import java.time.Duration;

class PeerFilter extends HttpFilter {
  private static final BucketConfiguration LIMIT =
      BucketConfiguration.builder()
          .addLimit(limit -> limit.capacity(5).refillGreedy(1, Duration.ofSeconds(2)))
          .build();

  @Override
  protected void doFilter(HttpServletRequest req, HttpServletResponse res, FilterChain chain)
      throws IOException, ServletException {
    Bucket bucket = Limits.BUCKETS.getProxy("peers:" + req.getRemoteAddr(), () -> LIMIT);
    ConsumptionProbe probe = bucket.tryConsumeAndReturnRemaining(1);
    if (probe.isConsumed()) {
      chain.doFilter(req, res);
      return;
    }
    long wait = Math.ceilDiv(probe.getNanosToWaitForRefill(), 1_000_000_000L);
    res.setHeader("Retry-After", Long.toString(wait));
    res.sendError(429);
  }
}
// rest

class Wiring {
  void wire(jakarta.servlet.ServletContext context) {
    context.addFilter("peers", new PeerFilter()).addMappingForUrlPatterns(null, true, "/*"); // limits
  }
}
