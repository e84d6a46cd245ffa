// limits
import io.github.bucket4j.Bucket;
import io.github.bucket4j.ConsumptionProbe;
import io.github.bucket4j.TokensInheritanceStrategy;
import jakarta.servlet.FilterChain;
import jakarta.servlet.ServletException;
import jakarta.servlet.http.HttpFilter;
import jakarta.servlet.http.HttpServletRequest;
import jakarta.servlet.http.HttpServletResponse;
import java.io.IOException;
import java.time.Duration;

class Responses {
  static void fields(HttpServletResponse res, String policy, long quota, long window, ConsumptionProbe probe) {
    long reset = Math.ceilDiv(probe.getNanosToWaitForReset(), 1_000_000_000L);
    res.setHeader("RateLimit-Policy", "\"%s\";q=%d;w=%d".formatted(policy, quota, window));
    res.setHeader("RateLimit", "\"%s\";r=%d;t=%d".formatted(policy, probe.getRemainingTokens(), reset));
  }

  static void deny(HttpServletResponse res, ConsumptionProbe probe) throws IOException {
    long wait = Math.ceilDiv(probe.getNanosToWaitForRefill(), 1_000_000_000L);
    res.setHeader("Retry-After", Long.toString(wait));
    res.sendError(429);
  }
}

class ApiFilter extends HttpFilter {
  @Override
  protected void doFilter(HttpServletRequest req, HttpServletResponse res, FilterChain chain)
      throws IOException, ServletException {
    User user = (User) req.getAttribute("user");
    boolean pro = user.plan().equals("pro");
    long quota = pro ? 1_000 : 100;
    Bucket bucket =
        Limits.BUCKETS.builder()
            .withImplicitConfigurationReplacement(pro ? 2 : 1, TokensInheritanceStrategy.ADDITIVE)
            .build("api:" + user.id(), () -> Limits.window(quota, Duration.ofMinutes(1)));
    ConsumptionProbe probe = bucket.tryConsumeAndReturnRemaining(1);
    Responses.fields(res, "api", quota, 60, probe);
    if (probe.isConsumed()) {
      chain.doFilter(req, res);
    } else {
      Responses.deny(res, probe);
    }
  }
}

class LoginFilter extends HttpFilter {
  @Override
  protected void doFilter(HttpServletRequest req, HttpServletResponse res, FilterChain chain)
      throws IOException, ServletException {
    String key = "logins:" + req.getParameter("account") + "|" + req.getRemoteAddr();
    Bucket bucket = Limits.BUCKETS.getProxy(key, () -> Limits.window(5, Duration.ofMinutes(15)));
    ConsumptionProbe probe = bucket.tryConsumeAndReturnRemaining(1);
    Responses.fields(res, "logins", 5, 900, probe);
    if (!probe.isConsumed()) {
      Responses.deny(res, probe);
      return;
    }
    chain.doFilter(req, res);
    if (res.getStatus() < 400) {
      bucket.addTokens(1);
    }
  }
}
// rest

record User(String id, String plan) {}

class Wiring {
  void wire(jakarta.servlet.ServletContext context) {
    context.addFilter("api", new ApiFilter()).addMappingForUrlPatterns(null, true, "/search"); // limits
    context.addFilter("login", new LoginFilter()).addMappingForUrlPatterns(null, true, "/login"); // limits
  }
}
