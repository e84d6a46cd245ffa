// limits
import { RedisStore } from "rate-limit-redis";
import { createClient } from "redis";

const redis = createClient({ url: process.env.REDIS_URL });
redis.on("error", (error) => console.error("redis", error.message));
await redis.connect();
const mails = new RedisStore({
  prefix: "rl:mails:",
  sendCommand: (...args) => redis.sendCommand(args),
});
await mails.init({ windowMs: 3_600_000 });
// rest

const send = async (to) => {
  if (to.startsWith("broken")) throw new Error("no route");
};

async function mail(to) {
  // limits
  const { totalHits, resetTime } = await mails.increment(to);
  if (totalHits > 3) {
    await mails.decrement(to);
    throw new Error(`too many mails; retry at ${resetTime.toISOString()}`);
  }
  try {
    // rest
    await send(to);
    // limits
  } catch (error) {
    await mails.decrement(to);
    throw error;
  }
  // rest
}
for (const to of ["ada", "broken", "broken", "broken", "broken", "ada", "ada", "ada"])
  await mail(to).then(
    () => console.log(to, "sent"),
    (e) => console.log(to, e.message),
  );
process.exit(0);
