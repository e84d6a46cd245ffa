// limits
import com.google.protobuf.Any;
import com.google.rpc.Code;
import com.google.rpc.RetryInfo;
import com.google.rpc.Status;
import io.github.bucket4j.Bucket;
import io.github.bucket4j.BucketConfiguration;
import io.github.bucket4j.ConsumptionProbe;
import io.grpc.Grpc;
import io.grpc.Metadata;
import io.grpc.ServerCall;
import io.grpc.ServerCallHandler;
import io.grpc.ServerInterceptor;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.net.InetSocketAddress;
import java.time.Duration;

class RateLimits implements ServerInterceptor {
  private static final BucketConfiguration SIGN_UPS = Limits.window(5, Duration.ofHours(1));
  private static final BucketConfiguration OTHERS = Limits.window(100, Duration.ofSeconds(1));

  @Override
  public <Q, S> ServerCall.Listener<Q> interceptCall(
      ServerCall<Q, S> call, Metadata headers, ServerCallHandler<Q, S> next) {
    boolean signUp = call.getMethodDescriptor().getBareMethodName().equals("SignUp");
    var peer = (InetSocketAddress) call.getAttributes().get(Grpc.TRANSPORT_ATTR_REMOTE_ADDR);
    String key = (signUp ? "sign-ups:" : "others:") + peer.getAddress().getHostAddress();
    Bucket bucket = Limits.BUCKETS.getProxy(key, () -> signUp ? SIGN_UPS : OTHERS);
    ConsumptionProbe probe = bucket.tryConsumeAndReturnRemaining(1);
    if (probe.isConsumed()) {
      return next.startCall(call, headers);
    }
    long nanos = probe.getNanosToWaitForRefill();
    var delay =
        com.google.protobuf.Duration.newBuilder()
            .setSeconds(nanos / 1_000_000_000)
            .setNanos((int) (nanos % 1_000_000_000));
    StatusRuntimeException denied =
        StatusProto.toStatusRuntimeException(
            Status.newBuilder()
                .setCode(Code.RESOURCE_EXHAUSTED_VALUE)
                .setMessage("rate limit exceeded")
                .addDetails(Any.pack(RetryInfo.newBuilder().setRetryDelay(delay).build()))
                .build());
    call.close(denied.getStatus(), denied.getTrailers());
    return new ServerCall.Listener<>() {};
  }
}
// rest

class Main {
  public static void main(String[] args) throws Exception {
    io.grpc.ServerBuilder.forPort(50051)
        .addService(new Users())
        .intercept(new RateLimits()) // limits
        .build()
        .start()
        .awaitTermination();
  }
}
