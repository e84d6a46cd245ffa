import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
// limits
import protobuf from "protobufjs";
import { getProtoPath } from "google-proto-files";
import { RedisStore } from "rate-limit-redis";
import { createClient } from "redis";

const redis = createClient({ url: process.env.REDIS_URL });
redis.on("error", (error) => console.error("redis", error.message));
await redis.connect();
const store = (name, windowMs) => {
  const store = new RedisStore({
    prefix: `rl:${name}:`,
    sendCommand: (...args) => redis.sendCommand(args),
  });
  store.init({ windowMs });
  return store;
};
const signUps = { limit: 5, store: store("sign-ups", 3_600_000) };
const others = { limit: 100, store: store("others", 1_000) };

const root = new protobuf.Root();
root.resolvePath = (_, path) =>
  path.startsWith("google/protobuf/") ? path : getProtoPath("..", path.replace(/^.*google\//, "google/"));
root.loadSync(["google/rpc/status.proto", "google/rpc/error_details.proto"]);
const Status = root.lookupType("google.rpc.Status");
const RetryInfo = root.lookupType("google.rpc.RetryInfo");

const denied = (resetTime) => {
  const ms = resetTime.getTime() - Date.now();
  const retryInfo = RetryInfo.encode({
    retryDelay: {
      seconds: Math.floor(ms / 1000),
      nanos: (ms % 1000) * 1_000_000,
    },
  }).finish();
  const code = grpc.status.RESOURCE_EXHAUSTED;
  const message = "rate limit exceeded";
  const typeUrl = "type.googleapis.com/google.rpc.RetryInfo";
  const details = [{ type_url: typeUrl, value: retryInfo }];
  const metadata = new grpc.Metadata();
  metadata.set("grpc-status-details-bin", Buffer.from(Status.encode({ code, message, details }).finish()));
  return { code, details: message, metadata };
};

const limits = (method, call) => {
  const policy = method.path.endsWith("/SignUp") ? signUps : others;
  return new grpc.ServerInterceptingCall(call, {
    start(next) {
      next({
        async onReceiveMetadata(metadata, next) {
          const peer = call.getPeer().replace(/:\d+$/, "");
          try {
            const count = await policy.store.increment(peer);
            if (count.totalHits > policy.limit) {
              return call.sendStatus(denied(count.resetTime));
            }
          } catch (error) {
            return call.sendStatus({ code: grpc.status.UNAVAILABLE });
          }
          next(metadata);
        },
      });
    },
  });
};
// rest

const { app } = grpc.loadPackageDefinition(protoLoader.loadSync("app.proto"));
const server = new grpc.Server({ interceptors: [limits] }); // limits
const reply = (call, done) => done(null, { text: "hi" });
server.addService(app.Users.service, { signUp: reply, find: reply });
server.bindAsync(`127.0.0.1:${process.env.PORT}`, grpc.ServerCredentials.createInsecure(), () => {});
