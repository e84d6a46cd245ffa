// Posts 5 MB and prints the status, or the error.
try {
  const response = await fetch(process.argv[2], { method: "POST", body: new Uint8Array(5_000_000) });
  console.log(response.status);
} catch (error) {
  console.log(error.cause?.code ?? error.message);
}
