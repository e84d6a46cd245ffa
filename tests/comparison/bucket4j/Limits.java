// The buckets in Redis that all applications use. Each application counts these lines too.
// limits
import io.github.bucket4j.BucketConfiguration;
import io.github.bucket4j.distributed.ExpirationAfterWriteStrategy;
import io.github.bucket4j.distributed.proxy.ProxyManager;
import io.github.bucket4j.redis.lettuce.Bucket4jLettuce;
import io.lettuce.core.RedisClient;
import io.lettuce.core.codec.ByteArrayCodec;
import io.lettuce.core.codec.RedisCodec;
import io.lettuce.core.codec.StringCodec;
import java.time.Duration;

class Limits {
  static final RedisCodec<String, byte[]> CODEC = RedisCodec.of(StringCodec.UTF8, ByteArrayCodec.INSTANCE);
  static final ProxyManager<String> BUCKETS =
      Bucket4jLettuce.casBasedBuilder(RedisClient.create(System.getenv("REDIS_URL")).connect(CODEC))
          .expirationAfterWrite(
              ExpirationAfterWriteStrategy.basedOnTimeForRefillingBucketUpToMax(Duration.ofSeconds(10)))
          .build();

  static BucketConfiguration window(long quota, Duration window) {
    return BucketConfiguration.builder()
        .addLimit(limit -> limit.capacity(quota).refillIntervally(quota, window))
        .build();
  }
}
// rest
