// limits
import com.fasterxml.jackson.core.type.TypeReference;
import com.fasterxml.jackson.databind.ObjectMapper;
import io.github.bucket4j.Bucket;
import io.github.bucket4j.ConsumptionProbe;
import io.github.bucket4j.TokensInheritanceStrategy;
import jakarta.servlet.FilterChain;
import jakarta.servlet.ServletException;
import jakarta.servlet.http.HttpFilter;
import jakarta.servlet.http.HttpServletRequest;
import jakarta.servlet.http.HttpServletResponse;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Map;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;

record Line(long quota, long windowSeconds) {}

record Policies(long version, Map<String, Line> lines) {
  static Policies read(Path file) throws IOException {
    Map<String, Line> lines = new ObjectMapper().readValue(file.toFile(), new TypeReference<>() {});
    for (String name : new String[] {"search", "login"}) {
      Line line = lines.get(name);
      if (line == null || line.quota() < 1 || line.windowSeconds() < 1) {
        throw new IOException(name + ": quota and windowSeconds must be above 0");
      }
    }
    return new Policies(Files.getLastModifiedTime(file).toMillis(), lines);
  }
}

class LiveLimits {
  private static final Path FILE = Path.of(System.getenv("LIMITS"));
  private static volatile Policies policies;

  static void start() throws IOException {
    policies = Policies.read(FILE);
    Executors.newSingleThreadScheduledExecutor().scheduleWithFixedDelay(LiveLimits::reload, 5, 5, TimeUnit.SECONDS);
  }

  private static void reload() {
    try {
      policies = Policies.read(FILE);
    } catch (IOException e) {
      System.getLogger("limits").log(System.Logger.Level.WARNING, "limits not reloaded", e);
    }
  }

  static Bucket bucket(String name, String key) {
    Policies policies = LiveLimits.policies;
    Line line = policies.lines().get(name);
    return Limits.BUCKETS.builder()
        .withImplicitConfigurationReplacement(policies.version(), TokensInheritanceStrategy.ADDITIVE)
        .build(name + ":" + key, () -> Limits.window(line.quota(), Duration.ofSeconds(line.windowSeconds())));
  }
}

class LiveFilter extends HttpFilter {
  private final String name;

  LiveFilter(String name) {
    this.name = name;
  }

  @Override
  protected void doFilter(HttpServletRequest req, HttpServletResponse res, FilterChain chain)
      throws IOException, ServletException {
    ConsumptionProbe probe = LiveLimits.bucket(name, req.getRemoteAddr()).tryConsumeAndReturnRemaining(1);
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
  void wire(jakarta.servlet.ServletContext context) throws java.io.IOException {
    LiveLimits.start(); // limits
    context.addFilter("search", new LiveFilter("search")).addMappingForUrlPatterns(null, true, "/search"); // limits
    context.addFilter("login", new LiveFilter("login")).addMappingForUrlPatterns(null, true, "/login"); // limits
  }
}
