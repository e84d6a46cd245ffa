// Makes one call with a client and prints what the client shows of the response.
import { Client, Metadata, credentials, status } from "@grpc/grpc-js";
import axios from "axios";
import axiosRetry from "axios-retry";
import got from "got";

const shown = (code, retryAfter) => `${code} ${retryAfter ?? "-"}`;
const fetched = async (url) => {
  const response = await fetch(url);
  return shown(response.status, response.headers.get("retry-after"));
};
const withAxios = async (url, method, options) => {
  const client = axios.create();
  if (options) axiosRetry(client, options);
  try {
    const response = await client.request({ url, method });
    return shown(response.status, response.headers["retry-after"]);
  } catch (error) {
    return shown(error.response.status, error.response.headers["retry-after"]);
  }
};
const withGot = async (url, method, retry) => {
  try {
    const response = await got(url, { method, retry });
    return shown(response.statusCode, response.headers["retry-after"]);
  } catch (error) {
    return shown(error.response.statusCode, error.response.headers["retry-after"]);
  }
};

const unary = (target, test, policy) =>
  new Promise((resolve) => {
    const options = policy && {
      "grpc.service_config": JSON.stringify({ methodConfig: [{ name: [{}], retryPolicy: policy }] }),
    };
    const client = new Client(target, credentials.createInsecure(), options);
    const metadata = new Metadata();
    metadata.set("x-case", test);
    const bytes = (text) => text;
    client.makeUnaryRequest("/test.Echo/Once", bytes, bytes, Buffer.from("\n\x02hi"), metadata, (error) => {
      const details = error?.metadata?.get("grpc-status-details-bin")?.length > 0;
      resolve(shown(status[error?.code ?? 0], details ? "details" : "-"));
      client.close();
    });
  });

const retryPolicy = {
  maxAttempts: 4,
  initialBackoff: "0.1s",
  maxBackoff: "1s",
  backoffMultiplier: 2,
  retryableStatusCodes: ["RESOURCE_EXHAUSTED", "UNAVAILABLE"],
};
const limited = (error) => error.response?.status === 429;
const soon = (error) => limited(error) && Number(error.response.headers["retry-after"]) <= 2;
const [client, url, test] = process.argv.slice(2);
const clients = {
  "fetch": () => fetched(url),
  "axios": () => withAxios(url, "GET"),
  "axios-retry": () => withAxios(url, "GET", { retries: 3 }),
  "axios-retry, `retryCondition`": () => withAxios(url, "GET", { retries: 3, retryCondition: limited }),
  "axios-retry, `retryCondition`, `POST`": () => withAxios(url, "POST", { retries: 3, retryCondition: limited }),
  "axios-retry, `retryCondition` by `retry-after`": () => withAxios(url, "GET", { retries: 3, retryCondition: soon }),
  "got": () => withGot(url, "GET"),
  "got, `maxRetryAfter: 2000`": () => withGot(url, "GET", { maxRetryAfter: 2000 }),
  "got, `POST`": () => withGot(url, "POST"),
  "got, `methods: [\"POST\"]`, `POST`": () => withGot(url, "POST", { limit: 3, methods: ["POST"] }),
  "grpc-js": () => unary(url, test),
  "grpc-js, `retryPolicy`": () => unary(url, test, retryPolicy),
};
console.log(await clients[client]());
